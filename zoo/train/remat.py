"""Rematerialization of a loaded model from a budget of bytes."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from zoo.models.configure import configure
from zoo.parallel import Mesh
from zoo.parallel.module import is_trainable, map_leaves
from zoo.parallel.remat import Remat
from zoo.parallel.spmd import spmd

_log = logging.getLogger("zoo")
_Model = TypeVar("_Model")

_POLICIES: tuple[Remat, ...] = ("none", "elementwise", "dots", "full")
"""Policies from the least recomputation to the most."""


def fit_remat(
    model: _Model,
    loss_fn: Callable,
    batch: PyTree,
    mesh: Mesh,
    *,
    budget: float | int,
    policies: tuple[Remat, ...] = _POLICIES,
) -> _Model:
    """Return `model` with the first of the policies whose residuals fit a budget of bytes per device.

        batch = {name: jax.ShapeDtypeStruct((64, 4096), "int32") for name in ("tokens", "targets")}
        model = train.fit_remat(model, loss_fn, batch, mesh, budget=20e9)

    - `batch`: arrays, or shapes, of one micro-batch: the rows that are between forward and backward pass at a time.
    - `budget`: bytes for the residuals that the forward pass keeps for the backward pass (`count_residual_bytes`).
      Parameters, gradients, optimizer state and the temporaries of one layer come on top.
    - `policies`: from the least recomputation to the most. Default: the policies that have a name.

    The model and the batch may consist of `jax.ShapeDtypeStruct`s. Nothing is compiled: each policy is traced, and its
    bytes are logged. **Raises** `ValueError` if no policy fits, with the bytes of each.
    """
    sizes: dict[str, int] = {}
    for remat in policies:
        candidate = configure(model, remat=remat)
        sizes[str(remat)] = count_residual_bytes(candidate, loss_fn, batch, mesh)
        if sizes[str(remat)] <= budget:
            _log.info(
                "remat=%s keeps %s bytes per device, within %s", remat, f"{sizes[str(remat)]:,}", f"{budget:,.0f}"
            )
            return candidate
    table = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
    raise ValueError(
        f"no policy keeps its residuals within {budget:,.0f} bytes per device: {table}. Take fewer rows per "
        "micro-batch, or a mesh that shards them further"
    )


def count_residual_bytes(model: Any, loss_fn: Callable, batch: PyTree, mesh: Mesh) -> int:
    """Count the bytes per device that the forward pass of `loss_fn(model, batch)` keeps for the backward pass, without
    parameters and the batch. It traces the gradient, and computes nothing.

    XLA may keep less, where it recomputes a cheap residual, or where several residuals are one array.
    """
    sizes: list[int] = []

    def measure(model: Any, batch: PyTree) -> tuple[()]:
        params, frozen = eqx.partition(model, map_leaves(is_trainable, model))
        loss = lambda params: loss_fn(eqx.combine(params, frozen), batch)[0]
        _, pull_back = jax.vjp(loss, params)
        given = {id(x) for x in jax.tree.leaves((model, batch))}
        residuals = {id(x): x for x in jax.tree.leaves(pull_back) if id(x) not in given}
        sizes.append(sum(x.size * x.dtype.itemsize for x in residuals.values() if hasattr(x, "dtype")))
        return ()

    arrays, static = eqx.partition((model, batch), lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
    jax.eval_shape(lambda arrays: spmd(measure, mesh, out=())(*eqx.combine(arrays, static)), arrays)
    return sizes[-1]
