"""Combine several adapters on one model: list, scale, select per row, and remove them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from zoo.layers import AbstractLinear
from zoo.layers.embedding import AbstractEmbedding
from zoo.models.parameter_paths import IndexRanges, map_modules
from zoo.models.targets import vmap_stacked
from zoo.parallel.trainable_copy import is_trainable_copy

from .base import AbstractAdapter, is_adapter
from .merged_layers import require_unmerged, restore_adapters
from .methods.dora import DoRA
from .methods.lora import LoRA
from .methods.state import list_state_names, remove_state

_Model = TypeVar("Model")


def adapter_names(model: Any) -> list[str]:
    """List the names of a model's adapters, innermost first, then the names of parameters or a state trained in
    full."""
    names: dict[str, None] = {}

    def visit(tree: Any) -> None:
        for node in jax.tree.leaves(tree, is_leaf=is_adapter):
            if is_adapter(node):
                visit(node.base)
                names.setdefault(node.adapter_name)

    visit(model)
    return list(names | dict.fromkeys([*_list_trainable_copy_names(model), *list_state_names(model)]))


def _list_trainable_copy_names(model: Any) -> list[str]:
    nodes = jax.tree.leaves(model, is_leaf=is_trainable_copy)
    return [node.adapter_name for node in nodes if is_trainable_copy(node)]


def check_adapter_name(model: Any, adapter_name: str | None) -> None:
    """**Raises** `ValueError` for a model without adapters, and for a name that none of them has."""
    names = adapter_names(model)
    if not names:
        raise ValueError("the model has no adapters")
    if adapter_name is not None and adapter_name not in names:
        raise ValueError(f"the model has no adapter {adapter_name!r}; it has {', '.join(names)}")


def _map_adapters(model: _Model, function: Any) -> _Model:
    """Apply `function` to every `TrainableCopy`, and to every adapter, the innermost first."""

    def map_adapter(node: Any) -> Any:
        if not is_adapter(node):
            return node
        return function(eqx.tree_at(lambda adapter: adapter.base, node, map_adapter(node.base)))

    model = jax.tree.map(
        lambda node: function(node) if is_trainable_copy(node) else node, model, is_leaf=is_trainable_copy
    )
    return jax.tree.map(map_adapter, model, is_leaf=is_adapter)


def remove(model: _Model, adapter_name: str | None = None) -> _Model:
    """Remove one adapter, or all, and return the base model; up to rounding for an adapter that was initialized with a
    part of the base's weight. Of a model that was merged with `keep=True`, the weights before merging are taken, and
    adapters that remain are not merged. **Raises** `ValueError` for a name that no adapter has."""
    check_adapter_name(model, adapter_name)
    model = remove_state(restore_adapters(model), adapter_name)
    is_removed = lambda node: is_trainable_copy(node) and adapter_name in (None, node.adapter_name)
    model = jax.tree.map(lambda node: node.base if is_removed(node) else node, model, is_leaf=is_trainable_copy)

    def unwrap(name: str, ranges: IndexRanges, adapter: AbstractAdapter) -> AbstractLinear | AbstractEmbedding:
        return vmap_stacked(lambda adapter: _unwrap_adapter(adapter, adapter_name), ranges)(adapter)

    return map_modules(unwrap, model, is_adapter)


def strip_adapters(model: _Model) -> _Model:
    """Return the model without its adapters, or the model itself if it has none."""
    return remove(model) if adapter_names(model) else model


def _unwrap_adapter(module: Any, adapter_name: str | None) -> Any:
    """Remove the adapters of this name from one layer's module."""
    if not is_adapter(module):
        return module
    base = _unwrap_adapter(module.base, adapter_name)
    if adapter_name not in (None, module.adapter_name):
        return module.with_base(base)
    if isinstance(module, LoRA) and module.first_down is not None and module.first_up is not None:
        part = jnp.matmul(module.first_up, module.first_down, precision="highest")
        return cast_like(base.with_weight(base.dense_weight + module.scale * part, base.dense_bias), base)
    return base


def set_strength(model: _Model, strengths: Mapping[str, float | int]) -> _Model:
    """Set the strength of adapters by name: 0 switches an adapter off, 1 on. Array shapes do not change, so nothing
    recompiles. **Raises** `ValueError` for a name that no adapter has, for the name of a trained state, and for a model
    whose adapters are merged."""
    require_unmerged(model)
    for name in strengths:
        check_adapter_name(model, name)
    if states := strengths.keys() & set(list_state_names(model)):
        raise ValueError(f"{states.pop()} is a trained state, which has no strength: adapters.remove takes it off")

    def set_adapter(adapter: Any) -> Any:
        if adapter.adapter_name not in strengths:
            return adapter
        strength = jnp.full_like(adapter.strength, strengths[adapter.adapter_name])
        return eqx.tree_at(lambda adapter: adapter.strength, adapter, strength)

    return _map_adapters(model, set_adapter)


def select_per_row(model: _Model, rows: Sequence[str | None] | Int[Array, "batch"]) -> _Model:
    """Select one adapter per row of a batch: the strength of all others is 0 there.

    - `rows`: one adapter name per row, None for none; or an array of their indices in `adapter_names(model)`, -1 for
      none, which may be a column of the batch. On a mesh, and with micro-batches, select inside the loss, where the
      rows are this device's.

    All adapters are computed for all rows and multiplied by 0 or 1: for a few adapters this costs little compared to
    the base.

    **Raises** `ValueError` for a name that no adapter has, for parameters or a state trained in full, which all rows
    share, for a model whose adapters are merged, and for a DoRA around another adapter: the norm of its rows would
    differ between rows of the batch. Adapters of experts, or of a head, raise when the model is called.
    """
    require_unmerged(model)
    names = adapter_names(model)
    if not isinstance(rows, jax.Array):
        for name in {name for name in rows if name is not None}:
            check_adapter_name(model, name)
        rows = jnp.asarray([-1 if name is None else names.index(name) for name in rows])
    if shared := {*_list_trainable_copy_names(model), *list_state_names(model)}:
        raise ValueError(f"{', '.join(sorted(shared))}: trained in full, which all rows share")

    def select(adapter: AbstractAdapter) -> AbstractAdapter:
        if isinstance(adapter, DoRA) and isinstance(beneath := adapter.base, AbstractAdapter):
            raise ValueError(
                f"the DoRA {adapter.adapter_name!r} divides by the norm of a weight that includes the adapter "
                f"{beneath.adapter_name!r}, which would differ between rows: add the DoRA first"
            )
        strength = (rows == names.index(adapter.adapter_name)).astype(jnp.float32)
        strength = jnp.broadcast_to(strength, (*adapter.has_adapter.shape, len(strength)))
        return eqx.tree_at(lambda adapter: adapter.strength, adapter, strength)

    return _map_adapters(model, select)


def cast_like(updated: _Model, original: _Model) -> _Model:
    """Cast arrays to the dtypes of the original."""
    return jax.tree.map(lambda new, old: new.astype(old.dtype), updated, original)
