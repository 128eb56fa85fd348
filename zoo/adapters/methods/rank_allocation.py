"""Which ranks of a model's AdaLoRAs are worth most, and a model in which only these are left."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.models.parameter_paths import map_modules

from ..base import AbstractAdapter
from ..targets import is_linear_site
from .adalora import AdaLoRA, find_adalora

_Model = TypeVar("Model")
_RankScores = tuple[Float[Array, "*layers rank"], ...]
"""For each matrix that has an AdaLoRA, in their order in the model, a number a rank."""


def rank_importance(model: Any, gradients: Any) -> _RankScores:
    """What the loss would lose with each rank, to first order: of e, and on the mean of A's row and of B's column,

        |e ∂e| + mean |A ∂A| + mean |B ∂B|

    (Zhang et al., arXiv:2303.10512, section 3.2, equations 7 and 8, of one step: average over several what it returns,
    as equations 9 and 10 do, with `jax.tree.map`). `gradients` are those of `zoo.trainable(model)`. A rank that a
    layer does not have is worth less than any. **Raises** `ValueError` for a model without an AdaLoRA.
    """
    pairs = zip(_list_adalora(model), _list_adalora(gradients), strict=True)
    return tuple(_adapter_rank_importance(adapter, gradient) for adapter, gradient in pairs)


def _adapter_rank_importance(adapter: AdaLoRA, gradient: AdaLoRA) -> Float[Array, "*layers rank"]:
    felt = lambda x, dx: jnp.abs(x.astype(jnp.float32) * dx)
    of_down = felt(adapter.down.weight, gradient.down.weight).mean(-1)
    of_up = felt(adapter.up.weight, gradient.up.weight).mean(-2)
    there = adapter.applies[..., None] & (jnp.arange(adapter.values.shape[-1]) < adapter.rank[..., None])
    return jnp.where(there, felt(adapter.values, gradient.values) + of_down + of_up, -1)


def keep_top_ranks(
    model: _Model, scores: Sequence[Float[Array, "*layers rank"]], budget: int | Int[Array, ""]
) -> _Model:
    """The model with e at zero but for the `budget` ranks of all its matrices that have the highest scores (Zhang et
    al., arXiv:2303.10512, section 3.2, equations 5 and 6). To be done after each step whose budget is not whole: a rank
    that is left out goes on to be learnt, and may come back.

    `scores` are `importance`'s, or an average of them. `budget` may be an array, so that a schedule compiles once.
    **Raises** `ValueError` where scores are not those of the model's matrices.
    """
    found = _list_adalora(model)
    if [x.shape for x in scores] != [adapter.values.shape for adapter in found]:
        raise ValueError(f"the model has {len(found)} matrices with an AdaLoRA, and these are no scores of theirs")
    flat = jnp.concatenate([x.reshape(-1) for x in scores])
    kept = jnp.zeros(flat.shape, bool).at[jnp.argsort(-flat)].set(jnp.arange(len(flat)) < budget)
    ends = [sum(x.size for x in scores[:n]) for n in range(1, len(scores))]
    masks = [part.reshape(x.shape) for part, x in zip(jnp.split(kept, ends), scores, strict=True)]
    following = iter(masks)
    return map_modules(lambda name, numbers, node: _mask_ranks(node, following), model, is_linear_site)


def _mask_ranks(node: Any, masks: Iterator[Bool[Array, "*layers rank"]]) -> Any:
    """A matrix's adapters, those beneath first, as `ranked` has them."""
    if not isinstance(node, AbstractAdapter):
        return node
    node = eqx.tree_at(lambda node: node.base, node, _mask_ranks(node.base, masks))
    if not isinstance(node, AdaLoRA):
        return node
    return eqx.tree_at(lambda node: node.values, node, jnp.where(next(masks), node.values, 0))


def _list_adalora(model: Any) -> list[AdaLoRA]:
    return [adapter for _, adapter in find_adalora(model)]
