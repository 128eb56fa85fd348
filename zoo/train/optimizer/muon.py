"""Muon on stacked and sharded matrices."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from zoo.parallel import Mesh

from .adam import correct_bias
from .masks import decay_mask, linear_mask
from .newton_schulz import COEFFICIENTS, NewtonSchulz, orthogonalize


class MuonState(NamedTuple):
    """State of `scale_by_muon`."""

    count: Int[Array, ""]
    """Steps so far."""
    momentum: PyTree


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    mesh: Mesh | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    consistent_rms: float | None = 0.2,
    weight_decay: float = 0.0,
    beta: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    ns_coeffs: Sequence[float] | Sequence[Sequence[float]] = COEFFICIENTS,
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32",
    adaptive: bool = False,
    eps: float = 1e-8,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
    matrices: Callable[[PyTree], PyTree] = linear_mask,
    mask: Any = decay_mask,
) -> optax.GradientTransformation:
    """Return Muon (Jordan, kellerjordan.github.io/posts/muon) for the weights of linear layers, experts and routers,
    and AdamW for all other parameters: embeddings, heads, norms, biases, convolutions, decay rates.

        optimizer = train.muon(schedule, mesh=mesh, weight_decay=0.1)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    Each layer and each expert of a stack is a matrix of its own, and so are query, key and value. The updates of
    matrices equal those of `optax.contrib.muon`, where options of the same names mean the same.

    - `mesh`: of the gradients. Without it, XLA partitions the iterations, and moves about 40 times as many bytes.
    - `adam_learning_rate`: of AdamW, by default `learning_rate`.
    - `consistent_rms`: scale of the updates, times sqrt(max(in, out)): at 0.2 they are as large as AdamW's, so its
      learning rate and weight decay carry over (Liu et al., arXiv:2502.16982, section 2.2). None scales by
      sqrt(max(1, out / in)) instead.
    - `weight_decay`: of both, for the parameters of `mask`.
    - `newton_schulz_dtype`: bfloat16 halves the bytes that devices exchange, and the matrix products run on tensor
      cores; updates differ by 3 to 5%.
    - `adaptive`: multiply the update of each matrix by its dual norm (arXiv:2409.20325).
    - `matrices`: True for the parameters of Muon. `train.matrix_mask` adds matrices in modules of your own.

    `init` **raises** `ValueError` if Muon gets no parameter, or one that is not a matrix or a stack of matrices.
    """
    newton_schulz = NewtonSchulz(_repeat_coefficients(ns_coeffs, ns_steps), eps, newton_schulz_dtype, adaptive)
    scale = scale_by_muon(newton_schulz, beta=beta, nesterov=nesterov, consistent_rms=consistent_rms, mesh=mesh)
    decay = optax.add_decayed_weights(weight_decay, mask)
    for_matrices = optax.chain(scale, decay, optax.scale_by_learning_rate(learning_rate))
    if adam_learning_rate is None:
        adam_learning_rate = learning_rate
    for_others = optax.adamw(adam_learning_rate, adam_b1, adam_b2, eps, weight_decay=weight_decay, mask=mask)

    def label(params: PyTree) -> PyTree:
        labels = jax.tree.map(lambda is_matrix: "muon" if is_matrix else "adam", matrices(params))
        if "muon" not in jax.tree.leaves(labels):
            raise ValueError(
                "Muon gets no matrix: of zoo.trainable(model) it takes weights of linear layers between hidden "
                "features; pass matrices=train.matrix_mask for modules of your own, or take another optimizer"
            )
        return labels

    return optax.partition({"muon": for_matrices, "adam": for_others}, label)


def scale_by_muon(
    newton_schulz: NewtonSchulz,
    *,
    beta: float = 0.95,
    nesterov: bool = True,
    consistent_rms: float | None = 0.2,
    mesh: Mesh | None = None,
) -> optax.GradientTransformation:
    """Orthogonalize the momentum of every matrix, and scale it by the matrix's shape.

        m = beta m + (1 - beta) g
        u = beta m / (1 - beta^(t + 1)) + (1 - beta) g / (1 - beta^t)    (without Nesterov m / (1 - beta^t))

    The momentum rests as gradients do. Only u and its orthogonalization travel, as many bytes as if it rested whole.
    """

    def init(params: PyTree) -> MuonState:
        for x in jax.tree.leaves(params):
            if x.ndim < 2:
                raise ValueError(f"Muon takes matrices and stacks of them, not an array of shape {list(x.shape)}")
        momentum = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params)
        return MuonState(jnp.zeros((), jnp.int32), momentum)

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, MuonState]:
        count = state.count + 1
        momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.momentum, updates)

        def look_ahead(m: Array, g: Array) -> Array:
            return beta * m / correct_bias(beta, count + 1) + (1 - beta) * g / correct_bias(beta, count)

        if nesterov:
            directions = jax.tree.map(look_ahead, momentum, updates)
        else:
            directions = jax.tree.map(lambda m: m / correct_bias(beta, count), momentum)
        orthogonal = orthogonalize(newton_schulz, directions, mesh)
        scaled = jax.tree.map(partial(_scale_by_shape, consistent_rms=consistent_rms), orthogonal)
        return scaled, MuonState(count, momentum)

    return optax.GradientTransformation(init, update)


def _scale_by_shape(
    x: Float[Array, "*stacked out in"], *, consistent_rms: float | None
) -> Float[Array, "*stacked out in"]:
    out, in_ = x.shape[-2:]
    if consistent_rms is None:
        return math.sqrt(max(1, out / in_)) * x
    return consistent_rms * math.sqrt(max(out, in_)) * x


def _repeat_coefficients(
    coefficients: Sequence[float] | Sequence[Sequence[float]], steps: int
) -> tuple[tuple[float, float, float], ...]:
    """Return a, b, c of each step: three numbers for all steps, or three for each, of which the last `steps` count."""
    table = np.asarray(coefficients, np.float64)
    if table.shape == (3,):
        table = np.tile(table, (max(steps, 0), 1))
    if steps < 1 or table.ndim != 2 or table.shape[1] != 3 or len(table) < steps:
        raise ValueError(
            f"ns_coeffs are three numbers, or three for each of ns_steps={steps} steps (1 or more), not {coefficients}"
        )
    return tuple((a, b, c) for a, b, c in table[-steps:].tolist())
