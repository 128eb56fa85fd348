"""Several adapters on one model: what they are called, how much each counts, and the model without them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from zoo.layers import AbstractEmbedding, AbstractLinear
from zoo.models.names import Numbers, map_modules
from zoo.parallel.learnt import is_learnt_whole

from .abstract import AbstractAdapter
from .embedding import EmbeddingLoRA
from .lora import LoRA
from .targets import over_stacked

Model = TypeVar("Model")
Adapter = AbstractAdapter | EmbeddingLoRA


def is_adapter(node: Any) -> bool:
    return isinstance(node, Adapter)


def labels(model: Any) -> list[str]:
    """The names of a model's adapters, innermost first; then those under which whole parameters are learnt."""
    found: dict[str, None] = {}

    def look(node: Any) -> None:
        for one in jax.tree.leaves(node, is_leaf=is_adapter):
            if is_adapter(one):
                look(one.base)
                found.setdefault(one.label)

    look(model)
    whole = [node.label for node in jax.tree.leaves(model, is_leaf=is_learnt_whole) if is_learnt_whole(node)]
    return list(found | dict.fromkeys(whole))


def chosen(model: Any, label: str | None) -> None:
    """**Raises** `ValueError` for a name that no adapter has."""
    there = labels(model)
    if not there:
        raise ValueError("the model has no adapters")
    if label is not None and label not in there:
        raise ValueError(f"the model has no adapter {label!r}; it has {', '.join(there)}")


def mapped(model: Model, function: Any) -> Model:
    """`function(adapter)` in place of every adapter, those beneath it first, and of every parameter that is learnt as a
    whole."""

    def one(node: Any) -> Any:
        if not is_adapter(node):
            return node
        return function(eqx.tree_at(lambda node: node.base, node, one(node.base)))

    model = jax.tree.map(lambda node: function(node) if is_learnt_whole(node) else node, model, is_leaf=is_learnt_whole)
    return jax.tree.map(one, model, is_leaf=is_adapter)


def without(model: Model, label: str | None = None) -> Model:
    """The model with an adapter of this name, or all of them, taken away: what was there before, but for rounding where
    the adapter had started with a part of it. **Raises** `ValueError` for a name that no adapter has."""
    chosen(model, label)
    gone = lambda node: is_learnt_whole(node) and label in (None, node.label)
    model = jax.tree.map(lambda node: node.base if gone(node) else node, model, is_leaf=is_learnt_whole)

    def one(name: str, numbers: Numbers, adapter: Adapter) -> AbstractLinear | AbstractEmbedding:
        return over_stacked(lambda adapter: taken(adapter, label), numbers)(adapter)

    return map_modules(one, model, is_adapter)


def plain_of(model: Model) -> Model:
    """The model without any adapters, if it has some."""
    return without(model) if labels(model) else model


def taken(adapter: Any, label: str | None) -> Any:
    """What is left of one matrix's adapters."""
    if not is_adapter(adapter):
        return adapter
    base = taken(adapter.base, label)
    if label not in (None, adapter.label):
        return eqx.tree_at(lambda adapter: adapter.base, adapter, base)
    if isinstance(adapter, LoRA) and adapter.first_down is not None and adapter.first_up is not None:
        part = jnp.matmul(adapter.first_up, adapter.first_down, precision="highest")
        return like(base.exchanged(base.matrix + adapter.scale * part, base.shift), base)
    return base


def weighted(model: Model, weights: Mapping[str, float | int]) -> Model:
    """The model with each adapter that is named counting so much: 0 switches it off, and 1 on. The arrays are as large
    as before, so that nothing is compiled anew. **Raises** `ValueError` for a name that no adapter has."""
    for label in weights:
        chosen(model, label)

    def one(adapter: Any) -> Any:
        if adapter.label not in weights:
            return adapter
        return eqx.tree_at(lambda a: a.weight, adapter, jnp.full_like(adapter.weight, weights[adapter.label]))

    return mapped(model, one)


def by_row(model: Model, rows: Sequence[str | None] | Int[Array, "batch"]) -> Model:
    """The model with an adapter of its own for each row of a batch: of the others' changes none counts there.

    - `rows`: a label for each row, None for none; or the labels' numbers in `labels(model)`, -1 for none: an array that
      comes with a batch. On a mesh, and with micro-batches, choose inside the loss: there the rows are its own.

    All adapters are computed for all rows, and what does not count is multiplied with 0: for a few adapters that is
    little beside the base.

    **Raises** `ValueError` for a label that no adapter has, and for one under which whole parameters are learnt, which
    all rows share. A model whose experts or head have adapters says so when it is called.
    """
    there = labels(model)
    if not isinstance(rows, jax.Array):
        for label in {label for label in rows if label is not None}:
            chosen(model, label)
        rows = jnp.asarray([-1 if label is None else there.index(label) for label in rows])
    whole = {node.label for node in jax.tree.leaves(model, is_leaf=is_learnt_whole) if is_learnt_whole(node)}
    if whole:
        raise ValueError(f"{', '.join(sorted(whole))}: whole parameters are learnt there, which all rows share")

    def one(adapter: Any) -> Any:
        own = (rows == there.index(adapter.label)).astype(jnp.float32)
        stacked = (adapter.scale if hasattr(adapter, "scale") else adapter.applies).shape
        return eqx.tree_at(lambda a: a.weight, adapter, jnp.broadcast_to(own, (*stacked, len(own))))

    return mapped(model, one)


def innermost(adapter: Any) -> Any:
    """What lies under all adapters."""
    while is_adapter(adapter):
        adapter = adapter.base
    return adapter


def like(changed: Model, before: Model) -> Model:
    """Arrays in the dtypes that they had."""
    return jax.tree.map(lambda new, old: new.astype(old.dtype), changed, before)
