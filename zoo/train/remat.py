"""Bytes that a rematerialization policy keeps between the forward and the backward pass."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from zoo.parallel import Mesh
from zoo.parallel.module import is_trainable, map_leaves
from zoo.parallel.spmd import spmd


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
