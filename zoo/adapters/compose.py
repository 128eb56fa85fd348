"""Several adapters on one model: what they are called, how much each counts, and the model without them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from zoo.layers import AbstractEmbedding, AbstractLinear
from zoo.models.parameter_paths import IndexRanges, map_modules
from zoo.parallel.trainable_copy import is_trainable_copy

from .base import AbstractAdapter
from .methods.embedding import EmbeddingLoRA
from .methods.lora import LoRA
from .targets import vmap_stacked

_Model = TypeVar("Model")
Adapter = AbstractAdapter | EmbeddingLoRA


def is_adapter(node: Any) -> bool:
    return isinstance(node, Adapter)


def adapter_names(model: Any) -> list[str]:
    """The names of a model's adapters, innermost first; then those under which whole parameters are learnt."""
    found: dict[str, None] = {}

    def look(node: Any) -> None:
        for one in jax.tree.leaves(node, is_leaf=is_adapter):
            if is_adapter(one):
                look(one.base)
                found.setdefault(one.adapter_name)

    look(model)
    whole = [node.adapter_name for node in jax.tree.leaves(model, is_leaf=is_trainable_copy) if is_trainable_copy(node)]
    return list(found | dict.fromkeys(whole))


def check_adapter_name(model: Any, adapter_name: str | None) -> None:
    """**Raises** `ValueError` for a name that no adapter has."""
    there = adapter_names(model)
    if not there:
        raise ValueError("the model has no adapters")
    if adapter_name is not None and adapter_name not in there:
        raise ValueError(f"the model has no adapter {adapter_name!r}; it has {', '.join(there)}")


def _map_adapters(model: _Model, function: Any) -> _Model:
    """`function(adapter)` in place of every adapter, those beneath it first, and of every parameter that is learnt as a
    whole."""

    def one(node: Any) -> Any:
        if not is_adapter(node):
            return node
        return function(eqx.tree_at(lambda node: node.base, node, one(node.base)))

    model = jax.tree.map(
        lambda node: function(node) if is_trainable_copy(node) else node, model, is_leaf=is_trainable_copy
    )
    return jax.tree.map(one, model, is_leaf=is_adapter)


def remove(model: _Model, adapter_name: str | None = None) -> _Model:
    """The model with an adapter of this name, or all of them, taken away: what was there before, but for rounding where
    the adapter had started with a part of it. **Raises** `ValueError` for a name that no adapter has."""
    check_adapter_name(model, adapter_name)
    gone = lambda node: is_trainable_copy(node) and adapter_name in (None, node.adapter_name)
    model = jax.tree.map(lambda node: node.base if gone(node) else node, model, is_leaf=is_trainable_copy)

    def one(name: str, numbers: IndexRanges, adapter: Adapter) -> AbstractLinear | AbstractEmbedding:
        return vmap_stacked(lambda adapter: _unwrap_adapter(adapter, adapter_name), numbers)(adapter)

    return map_modules(one, model, is_adapter)


def strip_adapters(model: _Model) -> _Model:
    """The model without any adapters, if it has some."""
    return remove(model) if adapter_names(model) else model


def _unwrap_adapter(adapter: Any, adapter_name: str | None) -> Any:
    """What is left of one matrix's adapters."""
    if not is_adapter(adapter):
        return adapter
    base = _unwrap_adapter(adapter.base, adapter_name)
    if adapter_name not in (None, adapter.adapter_name):
        return eqx.tree_at(lambda adapter: adapter.base, adapter, base)
    if isinstance(adapter, LoRA) and adapter.first_down is not None and adapter.first_up is not None:
        part = jnp.matmul(adapter.first_up, adapter.first_down, precision="highest")
        return cast_like(base.with_weight(base.dense_weight + adapter.scale * part, base.dense_bias), base)
    return base


def set_strength(model: _Model, strengths: Mapping[str, float | int]) -> _Model:
    """The model with each adapter that is named counting so much: 0 switches it off, and 1 on. The arrays are as large
    as before, so that nothing is compiled anew. **Raises** `ValueError` for a name that no adapter has."""
    for label in strengths:
        check_adapter_name(model, label)

    def one(adapter: Any) -> Any:
        if adapter.adapter_name not in strengths:
            return adapter
        return eqx.tree_at(
            lambda a: a.strength, adapter, jnp.full_like(adapter.strength, strengths[adapter.adapter_name])
        )

    return _map_adapters(model, one)


def select_per_row(model: _Model, rows: Sequence[str | None] | Int[Array, "batch"]) -> _Model:
    """The model with an adapter of its own for each row of a batch: of the others' changes none counts there.

    - `rows`: a label for each row, None for none; or the labels' numbers in `labels(model)`, -1 for none: an array that
      comes with a batch. On a mesh, and with micro-batches, choose inside the loss: there the rows are its own.

    All adapters are computed for all rows, and what does not count is multiplied with 0: for a few adapters that is
    little beside the base.

    **Raises** `ValueError` for a label that no adapter has, and for one under which whole parameters are learnt, which
    all rows share. A model whose experts or head have adapters says so when it is called.
    """
    there = adapter_names(model)
    if not isinstance(rows, jax.Array):
        for label in {label for label in rows if label is not None}:
            check_adapter_name(model, label)
        rows = jnp.asarray([-1 if label is None else there.index(label) for label in rows])
    whole = {node.adapter_name for node in jax.tree.leaves(model, is_leaf=is_trainable_copy) if is_trainable_copy(node)}
    if whole:
        raise ValueError(f"{', '.join(sorted(whole))}: whole parameters are learnt there, which all rows share")

    def one(adapter: Any) -> Any:
        own = (rows == there.index(adapter.adapter_name)).astype(jnp.float32)
        stacked = (adapter.scale if hasattr(adapter, "scale") else adapter.applies).shape
        return eqx.tree_at(lambda a: a.strength, adapter, jnp.broadcast_to(own, (*stacked, len(own))))

    return _map_adapters(model, one)


def get_base_layer(adapter: Any) -> Any:
    """What lies under all adapters."""
    while is_adapter(adapter):
        adapter = adapter.base
    return adapter


def cast_like(changed: _Model, before: _Model) -> _Model:
    """Arrays in the dtypes that they had."""
    return jax.tree.map(lambda new, old: new.astype(old.dtype), changed, before)
