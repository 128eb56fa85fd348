"""Walk a model and wrap its target modules with adapters, in all layers that are stacked together."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from zoo._checks import wrap_key
from zoo.layers.embedding import AbstractEmbedding
from zoo.models.parameter_paths import IndexRanges, map_modules
from zoo.models.targets import LinearSite, Targets, find_linears, is_linear_site, match_targets, vmap_stacked
from zoo.parallel.trainable_copy import TrainableCopy

from .base import AbstractAdapter, get_base_layer
from .merged_layers import require_unmerged

_Model = TypeVar("Model")
_AdapterPlan = Callable[[LinearSite], tuple[Callable[..., AbstractAdapter], Mapping[str, np.ndarray]] | None]
"""Return the factory of a layer's adapter and the arguments that differ between stacked layers, or None to skip it."""


def apply_adapters(model: _Model, plan: _AdapterPlan, key: Key[Array, ""]) -> _Model:
    """Wrap every linear layer for which `plan` returns a factory and a table of arguments per layer.

    The factory is called as `factory(base, key=key, **arguments)` with the base, key and arguments of one layer, and
    mapped over the stacked dims.

    **Raises** `ValueError` for a module that is trained in full, for one that has an adapter of this name already, and
    for a model whose adapters are merged; `TypeError` for what is not a PRNG key.
    """
    require_unmerged(model)
    key = wrap_key(key)
    order = {site.identity: number for number, site in enumerate(find_linears(model, include_embeddings=True))}

    def wrap(name: str, ranges: IndexRanges, module: Any) -> Any:
        planned = plan(LinearSite(name, ranges, module))
        if planned is None:
            return module
        factory, tables = planned
        if isinstance(getattr(get_base_layer(module), "weight", None), TrainableCopy):
            raise ValueError(f"{name}.weight is trained in full: no adapter wraps it")

        def wrap_layer(base: Any, key: Key[Array, ""], arguments: dict[str, Array]) -> Any:
            return factory(base, key=key, **arguments)

        keys = jax.random.split(jax.random.fold_in(key, order[name, ranges]), tuple(len(run) for run in ranges))
        arguments = {word: jnp.asarray(table) for word, table in tables.items()}
        wrapped = vmap_stacked(wrap_layer, ranges)(module, keys, arguments)
        _require_new_name(name, wrapped)
        return wrapped

    return map_modules(wrap, model, is_linear_site)


def _require_new_name(site: str, adapter: AbstractAdapter) -> None:
    """**Raises** `ValueError` if an adapter wraps another one of its name: one of the two would be saved."""
    beneath = adapter.base
    while isinstance(beneath, AbstractAdapter):
        if beneath.adapter_name == adapter.adapter_name:
            raise ValueError(
                f"{site} has an adapter {adapter.adapter_name!r} already: pass another adapter_name=, or take it off "
                "with adapters.remove"
            )
        beneath = beneath.base


def apply_uniform(
    model: _Model, factory: Callable[..., AbstractAdapter], targets: Targets, key: Key[Array, ""], adapter_name: str
) -> _Model:
    """Wrap the target modules with adapters of one size in all layers. The factory's argument `applies` is False in
    layers that are stacked with a target module and are none."""
    is_target = match_targets(targets, find_linears(model, include_embeddings=True))

    def plan(site: LinearSite) -> Any:
        applies = site.tabulate(is_target, bool)
        if not applies.any():
            return None
        refuse_embedding(site, adapter_name)
        return factory, {"applies": applies}

    return apply_adapters(model, plan, key)


def check_rank(rank: int) -> None:
    """**Raises** `ValueError` for a rank below 1."""
    if rank < 1:
        raise ValueError(f"a rank is at least 1, not {rank}")


def compute_scale(alpha: float | int | None, rank: int) -> float:
    """Return alpha / rank, or 1 without alpha. **Raises** `ValueError` for a rank below 1."""
    check_rank(rank)
    return 1.0 if alpha is None else alpha / rank


def refuse_embedding(site: LinearSite, method: str) -> None:
    """**Raises** `ValueError` for an embedding, which only LoRA supports."""
    if isinstance(site.module, AbstractEmbedding):
        raise ValueError(f"{method}: {site.name} is a table that is looked up, which only a LoRA goes around")
