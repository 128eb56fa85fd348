"""AdaLoRA rank allocation: importance scores, and masking all but the top `budget` ranks."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.models.parameter_paths import map_modules
from zoo.models.targets import is_linear_site

from ..base import is_adapter
from .adalora import AdaLoRA, find_adalora

_Model = TypeVar("Model")
_RankScores = tuple[Float[Array, "*layers rank"], ...]
"""Scores of each AdaLoRA, in the order of the model."""


def rank_importance(model: Any, gradients: Any) -> _RankScores:
    """Return the importance of each rank, a first-order estimate of the loss without it: of e, plus the means over A's
    row and B's column,

        |e ∂e| + mean |A ∂A| + mean |B ∂B|

    (Zhang et al., arXiv:2303.10512, section 3.2, equations 7 and 8, for one step: average over steps, as equations 9
    and 10 do, with `jax.tree.map`). `gradients` are with respect to `zoo.trainable(model)`. Padding ranks get the score
    -1, below any other. **Raises** `ValueError` for a model without an AdaLoRA.
    """
    pairs = zip(_list_adalora(model), _list_adalora(gradients), strict=True)
    return tuple(_adapter_rank_importance(adapter, gradient) for adapter, gradient in pairs)


def _adapter_rank_importance(adapter: AdaLoRA, gradient: AdaLoRA) -> Float[Array, "*layers rank"]:
    sensitivity = lambda x, dx: jnp.abs(x.astype(jnp.float32) * dx)
    down = sensitivity(adapter.down.weight, gradient.down.weight).mean(-1)
    up = sensitivity(adapter.up.weight, gradient.up.weight).mean(-2)
    is_used = adapter.applies[..., None] & (jnp.arange(adapter.values.shape[-1]) < adapter.rank[..., None])
    return jnp.where(is_used, sensitivity(adapter.values, gradient.values) + down + up, -1)


def keep_top_ranks(
    model: _Model, scores: Sequence[Float[Array, "*layers rank"]], budget: int | Int[Array, ""]
) -> _Model:
    """Set e to zero in all but the `budget` ranks with the highest scores over the whole model (Zhang et al.,
    arXiv:2303.10512, section 3.2, equations 5 and 6). Call it after each step while the budget is below the total: a
    masked rank stays trainable, and may come back.

    `scores` come from `rank_importance`, or are an average of its results. `budget` may be an array, so that a schedule
    compiles once. **Raises** `ValueError` if the scores do not fit the model's AdaLoRAs.
    """
    found = _list_adalora(model)
    if [x.shape for x in scores] != [adapter.values.shape for adapter in found]:
        raise ValueError(f"the scores do not fit the model's {len(found)} matrices with an AdaLoRA")
    flat = jnp.concatenate([x.reshape(-1) for x in scores])
    is_kept = jnp.zeros(flat.shape, bool).at[jnp.argsort(-flat)].set(jnp.arange(len(flat)) < budget)
    ends = [sum(x.size for x in scores[:n]) for n in range(1, len(scores))]
    masks = [mask.reshape(x.shape) for mask, x in zip(jnp.split(is_kept, ends), scores, strict=True)]
    remaining = iter(masks)
    return map_modules(lambda name, ranges, module: _mask_ranks(module, remaining), model, is_linear_site)


def _mask_ranks(module: Any, masks: Iterator[Bool[Array, "*layers rank"]]) -> Any:
    """Mask the ranks of a layer's AdaLoRAs, the innermost first, in the order of `find_adalora`."""
    if not is_adapter(module):
        return module
    module = eqx.tree_at(lambda adapter: adapter.base, module, _mask_ranks(module.base, masks))
    if not isinstance(module, AdaLoRA):
        return module
    mask = next(masks).reshape(module.values.shape)  # of layers in one round; the model's may be in several
    return eqx.tree_at(lambda adapter: adapter.values, module, jnp.where(mask, module.values, 0))


def _list_adalora(model: Any) -> list[AdaLoRA]:
    return [adapter for _, adapter in find_adalora(model)]
