"""The parameters to evaluate and to export, which are not the ones that schedule-free optimizers train."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree
from optax.contrib import ScheduleFreeState

_Model = TypeVar("_Model")


def eval_params(opt_state: PyTree, model: _Model) -> _Model:
    """Return the model with the parameters at which to evaluate, sample and export it: for schedule-free optimizers
    (Defazio et al., arXiv:2405.15682) the average x, for all others `model` itself.

        evaluate(train.eval_params(opt_state, model))

    A schedule-free optimizer computes gradients at y = b1 x + (1 - b1) z. `model` holds y, the state holds z, and
    x = (y - (1 - b1) z) / b1. Train on with `model`, not with the result.

    - `opt_state`: of any optimizer of optax. The schedule-free state may be part of a chain, or of a group.
    - `model`: a model, or its trainable parameters.
    """
    for state in jax.tree.leaves(opt_state, is_leaf=_is_schedule_free):
        if _is_schedule_free(state):
            model = _move_to_average(model, state.z, state.b1)
    return model


def _is_schedule_free(node: Any) -> bool:
    return isinstance(node, ScheduleFreeState)


def _move_to_average(model: _Model, z: PyTree, b1: Float[Array, ""]) -> _Model:
    """Replace each parameter of which `z` has one; a group's has a placeholder for every other one."""
    has_none = lambda node: node is None or isinstance(node, optax.MaskedNode)
    is_moved = jax.tree.map(lambda x: not has_none(x), z, is_leaf=has_none)
    y, rest = eqx.partition(model, is_moved)
    z = eqx.filter(z, is_moved, is_leaf=has_none)
    x = jax.tree.map(_place_like, _compute_average(y, z, b1), y)
    return eqx.combine(x, rest)


def _place_like(x: Array, y: Array) -> Array:
    """Give the average the sharding of its parameter: the state may have another, as in ZeRO-1."""
    return x if isinstance(y, Tracer) else jax.device_put(x, y.sharding)


@jax.jit
def _compute_average(y: PyTree, z: PyTree, b1: Float[Array, ""]) -> PyTree:
    def average(y: Array, z: Array) -> Array:
        return ((y - (1 - b1) * z) / b1).astype(y.dtype)

    return jax.tree.map(average, y, z)
