"""Join the arrays of one PEFT module: the parts of a fused projection, and all experts of one parameter."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import numpy as np

from zoo.models.hf.spec import TensorMapping
from zoo.models.targets import find_linears, vmap_stacked
from zoo.weights.safetensors import CheckpointError
from zoo.weights.save import gather_to_host

from ..compose import strip_adapters
from ..methods.dora import DoRA
from ..methods.lora import LoRA
from ..names import PeftModule
from .methods import PeftMethod, PeftTensor, list_peft_tensors

ModuleParts = Mapping[int, tuple[PeftModule, Any, Any]]
"""Parts of one PEFT module, by number: the module, our adapter, and the adapter that values are read from."""
Experts = Mapping[int, ModuleParts]
"""The parts of each expert of one PEFT module that holds several; only number 0 for any other module."""


def get_first_layer(experts: Experts) -> tuple[PeftModule, Any, Any]:
    """Return the first part of the first expert of a module."""
    return next(iter(next(iter(experts.values())).values()))


def _get_layer_array(field: PeftTensor, module: PeftModule, adapter: Any, value: Any) -> np.ndarray:
    """Return one layer's array without the padding of its rank; with the initial factors, if the base gave them up."""
    array = field.to_peft(gather_to_host(field.get(value), module.index))
    if field.rank_dim is None:
        return array
    ranks = range(int(np.asarray(adapter.rank)[module.index]))
    array = array.take(ranks, axis=field.rank_dim)
    if not isinstance(value, LoRA) or value.first_down is None or value.first_up is None:
        return array
    initial = gather_to_host(value.first_down if field.rank_dim == 0 else -value.first_up, module.index)
    return np.concatenate([array, initial.take(ranks, field.rank_dim)], axis=field.rank_dim)


def join_parts(field: PeftTensor, parts: ModuleParts, model: Any = None) -> np.ndarray:
    """Join the arrays of a fused module's parts into one tensor. `model` has the weights of parts without the adapter,
    whose norms are the magnitudes that a DoRA leaves unchanged."""
    arrays = {part: _get_layer_array(field, *layer) for part, layer in parts.items()}
    module, adapter, _ = next(iter(parts.values()))
    if len(module.mapping.parts) == 1:
        if field.has_rows and not module.mapping.keeps_rows:
            return _join_rows(module, arrays)
        return arrays[0]
    if not isinstance(adapter, LoRA | DoRA):
        _require_all_parts(module, adapter, arrays)
        if field.has_rows:
            return _join_rows(module, arrays, field.fill or 0)
        first = next(iter(arrays.values()))
        if any(not np.array_equal(array, first) for array in arrays.values()):
            raise CheckpointError(
                f"{module.peft_name} has one {field.suffix} in PEFT's files, and its parts have several"
            )
        return first
    down_tensor = list_peft_tensors(adapter)[0]
    downs = {part: _get_layer_array(down_tensor, *layer) for part, layer in parts.items()}
    distinct = {down.tobytes(): down for down in downs.values()}
    if field.rank_dim == 0:
        return np.concatenate(list(distinct.values()))
    if field.rank_dim == 1:
        starts = dict(zip(distinct, np.cumsum([0, *map(len, distinct.values())]), strict=False))
        total = sum(map(len, distinct.values()))
        for part, up in arrays.items():
            start = starts[downs[part].tobytes()]
            arrays[part] = np.zeros((len(up), total), up.dtype)
            arrays[part][:, start : start + up.shape[1]] = up
    elif model is not None:  # the magnitudes of a DoRA
        arrays = {**_compute_row_norms(model, module), **arrays}
    return _join_rows(module, arrays)


def _require_all_parts(module: PeftModule, adapter: Any, arrays: Mapping[int, np.ndarray]) -> None:
    """**Raises** `CheckpointError` for a fused module with an adapter on only some of its parts, if no tensor of the
    method has rows that could leave the other parts unchanged."""
    without = [name for part, name in enumerate(module.mapping.parts) if part not in arrays]
    if without and not any(tensor.has_rows for tensor in list_peft_tensors(adapter)):
        raise CheckpointError(
            f"{module.peft_name} is one module in PEFT's files, whose {type(adapter).__name__} would also change "
            f"{', '.join(without)}: target all of its parts, or merge the adapter and save the model"
        )


def _compute_row_norms(model: Any, module: PeftModule) -> dict[int, np.ndarray]:
    """Return the norms of the rows of every part of a fused module in the model without its adapters."""
    linears = {site.identity: site.module for site in find_linears(strip_adapters(model))}
    norms = {}
    for part, name in enumerate(module.mapping.parts):
        linear = linears[name.removesuffix(".weight"), module.site.ranges]
        weight = vmap_stacked(lambda linear: linear.dense_weight, module.site.ranges)(linear)
        norms[part] = np.linalg.norm(gather_to_host(weight, module.index), axis=-1)
    return norms


def get_joined_rank(parts: ModuleParts) -> int:
    """Return the rank of a module in the file, which is larger than the rank of its parts if their A differ."""
    _, adapter, _ = next(iter(parts.values()))
    return len(join_parts(list_peft_tensors(adapter)[0], parts))


def sum_parts(field: PeftTensor, parts: ModuleParts) -> np.ndarray:
    """Join the gradients of a fused module's parts, summed for an array that they share."""
    arrays = {part: _get_layer_array(field, *layer) for part, layer in parts.items()}
    module = next(iter(parts.values()))[0]
    if field.has_rows:
        return _join_rows(module, arrays)
    return sum(arrays.values(), start=np.zeros((), np.float32))


def _join_rows(module: PeftModule, arrays: Mapping[int, np.ndarray], fill: float = 0) -> np.ndarray:
    """Concatenate the rows of parts in the layout of the fused weight, with `fill` for a part without the adapter."""
    first = next(iter(arrays.values()))
    joined = np.full((sum(module.part_sizes), *first.shape[1:]), fill, first.dtype)
    shapes = [(size, *first.shape[1:]) for size in module.part_sizes]
    mapping = TensorMapping(module.mapping.parts, module.mapping.groups, runs=module.mapping.runs)
    for part, view in enumerate(mapping.views(joined, shapes, 0)):
        if part in arrays:
            view[...] = arrays[part].reshape(view.shape)
    return joined


def join_experts(field: PeftTensor, module: PeftModule, arrays: Mapping[int, np.ndarray]) -> np.ndarray:
    """Join A or B of all experts into one tensor, padded with zeros to the largest rank."""
    assert field.rank_dim is not None
    first = next(iter(arrays.values()))
    rank = max(array.shape[field.rank_dim] for array in arrays.values())
    if field.rank_dim == 0:
        joined = np.zeros((module.num_experts, rank, first.shape[1]), first.dtype)
        for expert, array in arrays.items():
            joined[expert, : len(array)] = array
        return joined.reshape(-1, first.shape[1])
    joined = np.zeros((len(first), rank, module.num_experts), first.dtype)
    for expert, array in arrays.items():
        joined[:, : array.shape[1], expert] = array
    return joined.reshape(len(first), -1)


def keep_largest_shared(
    tensors: Mapping[str, np.ndarray], method: PeftMethod, adapter: Any, index: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Return the tensors that all modules share, such as VeRA's A and B: the tensors of this layer if they are larger
    than the tensors collected so far. Each layer has a slice of the largest."""
    largest = {}
    for name, field in method.shared.items():
        array = gather_to_host(attrgetter(field)(adapter), index)
        is_larger = name not in tensors or array.size > tensors[name].size
        largest[name] = array if is_larger else tensors[name]
    return largest
