"""Adam with moments in any storage format."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key, PyTree

from zoo.parallel.module import map_leaves

from .apply_updates import fold_in_path
from .moments import AbstractMoment, Float32Moment

FLOAT32 = Float32Moment()
"""The format unless another is given: exact."""


class AdamState(NamedTuple):
    """State of `scale_by_adam`."""

    count: Int[Array, ""]
    """Steps so far."""
    key: Key[Array, ""]
    """PRNG key of stochastic rounding."""
    first: PyTree
    """First moments, as stored."""
    second: PyTree
    """Second moments, as stored."""


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    *,
    mask: Any = None,
    first: AbstractMoment = FLOAT32,
    second: AbstractMoment = FLOAT32,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Return AdamW (Loshchilov & Hutter, arXiv:1711.05101) with its moments in two formats of
    `zoo.train.optimizer.moments`, and updates in float32 whatever the dtype of the parameters.

        moments = {"first": train.BlockwiseMoment(), "second": train.BlockwiseMoment(signed=False)}
        optimizer = train.adamw(schedule, b2=0.95, mask=train.decay_mask, **moments)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    With float32 moments and parameters it computes the same as `optax.adamw`. `seed` is for stochastic rounding. On a
    mesh, place the new state again in each step: nothing else says how scales and means are sharded.
    """
    return optax.chain(
        scale_by_adam(b1, b2, eps, first=first, second=second, seed=seed),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    first: AbstractMoment = FLOAT32,
    second: AbstractMoment = FLOAT32,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Scale gradients as Adam does (Kingma & Ba, arXiv:1412.6980, algorithm 1), in float32:

        m = b1 m + (1 - b1) g,    v = b2 v + (1 - b2) g²,    u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

    - `first`, `second`: storage formats of m and v between steps.

    The state has the key of stochastic rounding, so a resumed run rounds like an uninterrupted one.
    """

    def init(params: PyTree) -> AdamState:
        key = jax.random.key(seed)

        def encode_zeros(moment):  # for each moment its own zeros, so that both can be donated
            return map_leaves(lambda leaf, x: moment.encode(leaf, jnp.zeros_like(x, jnp.float32), key), params)

        return AdamState(jnp.zeros((), jnp.int32), key, encode_zeros(first), encode_zeros(second))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, AdamState]:
        key, first_key, second_key = jax.random.split(state.key, 3)
        count = state.count + 1

        def scale(leaf, gradient, first_stored, second_stored):
            gradient = gradient.astype(jnp.float32)
            m = b1 * first.decode(leaf, first_stored) + (1 - b1) * gradient
            v = b2 * second.decode(leaf, second_stored) + (1 - b2) * gradient**2
            m_stored = first.encode(leaf, m, fold_in_path(first_key, leaf))
            v_stored = second.encode(leaf, v, fold_in_path(second_key, leaf))
            m_hat = m / correct_bias(b1, count)
            v_hat = v / correct_bias(b2, count)
            return m_hat / (jnp.sqrt(v_hat) + eps), m_stored, v_stored

        results = map_leaves(scale, updates, state.first, state.second)
        pick = lambda index: jax.tree.map(lambda _, result: result[index], updates, results)
        return pick(0), AdamState(count, key, pick(1), pick(2))

    return optax.GradientTransformation(init, update)


def correct_bias(decay: float, count: Int[Array, ""]) -> Float[Array, ""]:
    """Return 1 - decay^count, without the cancellation that costs four digits where `decay` is near 1."""
    if decay > 0:
        return -jnp.expm1(count * math.log(decay))
    return jnp.ones((), jnp.float32)
