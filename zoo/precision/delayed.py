"""Histories of delayed scaling: add the maxima that a step has seen."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from zoo.layers.quantized.fp8 import AmaxHistory

_Model = TypeVar("Model")


def update_amax(model: _Model, seen: PyTree) -> _Model:
    """Add the maxima that a step has seen to the histories of a model with `DelayedScaling`; the oldest go.

    - `seen`: the observations of `zoo.value_and_grad(..., observe=True)`.

    If a maximum is 0 or not finite, the previous maximum is kept, as in Transformer Engine.

    **Raises** `ValueError` for a model without histories.
    """
    nodes = jax.tree.leaves(model, is_leaf=_is_history)
    if not any(map(_is_history, nodes)):
        raise ValueError("the model has no histories of maxima: make it by zoo.precision.fp8(model, DelayedScaling())")

    def update(node, new):
        if not _is_history(node):
            return node
        return jax.tree.map(_prepend_amax, node, new)

    return jax.tree.map(update, model, seen, is_leaf=_is_history)


def _is_history(node: Any) -> bool:
    return isinstance(node, AmaxHistory)


def _prepend_amax(
    history: Float[Array, "*stacked history"], seen: Float[Array, "*stacked history"]
) -> Float[Array, "*stacked history"]:
    latest = seen[..., :1]
    before = history[..., :1]
    latest = jnp.where(jnp.isfinite(latest) & (latest > 0), latest, before)
    return jnp.concatenate([latest, history[..., :-1]], axis=-1)
