"""Write PEFT's files: adapter_config.json and adapter_model.safetensors."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zoo._files import create_files
from zoo.models.hf.spec import NameMap, TensorMapping
from zoo.weights import CheckpointError
from zoo.weights.safetensors import write_tensors
from zoo.weights.save import gather_to_host

from ..compose import adapter_names, check_adapter_name, is_adapter
from ..methods.adalora import AdaLoRA
from ..methods.dora import DoRA
from ..methods.embedding import EmbeddingLoRA
from ..methods.ia3 import IA3
from ..methods.lora import LoRA
from ..methods.lycoris import LoHa, LoKr
from ..methods.oft import OFT
from ..methods.vera import VeRA
from ..targets import find_linears
from . import base_tensors
from .config import CONFIG_FILE
from .forms import build_adalora_config, build_oft_config
from .names import (
    PREFIX,
    VERA_SHARED,
    WEIGHTS_FILE,
    PeftModule,
    PeftTensor,
    get_name_table,
    list_peft_modules,
    list_peft_tensors,
)

_ModuleParts = Mapping[int, tuple[PeftModule, Any, Any]]
"""Parts of one PEFT module, by number: the module, our adapter, and the adapter that values are read from."""


def save(model: Any, directory: str | Path, *, adapter_name: str | None = None) -> None:
    """Save one adapter in PEFT's format.

    - `adapter_name`: required if the model has several adapters.

    An adapter that was initialized with a part of its base's weight (PiSSA, OLoRA) is saved as the update of the
    original base, which has twice the rank.

    For a fused projection, the parts are saved as one adapter of the same rank while they share A. Once training has
    changed A, their ranks are concatenated, which is equivalent.

    **Raises** `CheckpointError` for a model without such an adapter, and for a method that PEFT does not have.
    """
    adapter_name = _resolve_adapter_name(model, adapter_name)
    tensors = collect_tensors(model, adapter_name=adapter_name)
    config = _build_adapter_config(model, adapter_name)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    shapes = {name: (array.shape, array.dtype) for name, array in tensors.items()}
    with create_files(path) as create:
        write_tensors(create(WEIGHTS_FILE), shapes, tensors.__getitem__)
        create(CONFIG_FILE).write((json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _resolve_adapter_name(model: Any, adapter_name: str | None) -> str:
    """Return the given name, or that of the only adapter."""
    try:
        check_adapter_name(model, adapter_name)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    names = adapter_names(model)
    if adapter_name is None and len(names) > 1:
        raise CheckpointError(f"the model has several adapters, {', '.join(names)}: name one with adapter_name=")
    return names[0] if adapter_name is None else adapter_name


def collect_tensors(model: Any, tree: Any = None, *, adapter_name: str) -> dict[str, np.ndarray]:
    """Return an adapter's arrays by PEFT's tensor names: those of `model`, or their gradients from a tree of its
    structure, summed over the parts of a fused module that share an array."""
    tensors: dict[str, np.ndarray] = {}
    table = get_name_table(model)
    by_module = _group_by_module(model, tree, table, adapter_name)
    combine_parts = _join_parts if tree is None else _sum_parts
    for peft_name, parts in by_module.items():
        module, adapter, value = next(iter(parts.values()))
        for field in list_peft_tensors(adapter):
            tensors[f"{PREFIX}{peft_name}.{field.suffix}"] = combine_parts(field, parts)
        if isinstance(adapter, VeRA) and tree is None:
            tensors |= _keep_largest_shared(tensors, value, module.index)
    of_base, _ = base_tensors.collect_base_tensors(model, tree, table, adapter_name, set(by_module))
    return dict(sorted((tensors | {PREFIX + name: array for name, array in of_base.items()}).items()))


def _group_by_module(
    model: Any, tree: Any, table: NameMap, adapter_name: str
) -> dict[str, dict[int, tuple[PeftModule, Any, Any]]]:
    """Group the layers that have the adapter by PEFT module."""
    sites = find_linears(model if tree is None else tree, include_embeddings=True)
    values = {site.identity: site.module for site in sites}
    by_module: dict[str, dict[int, tuple[PeftModule, Any, Any]]] = {}
    for module in list_peft_modules(model, table):
        adapter = _find_adapter(module.site.module, adapter_name)
        if adapter is not None and bool(np.asarray(adapter.has_adapter)[module.index]):
            value = _find_adapter(values[module.site.identity], adapter_name)
            by_module.setdefault(module.peft_name, {})[module.part] = module, adapter, value
    return by_module


def _find_adapter(node: Any, adapter_name: str) -> Any:
    """Return the adapter of this name among those of one layer, or None."""
    while is_adapter(node) and node.adapter_name != adapter_name:
        node = node.base
    return node if is_adapter(node) else None


def _get_layer_array(field: PeftTensor, module: PeftModule, adapter: Any, value: Any) -> np.ndarray:
    """Return one layer's array without the padding of its rank; with the initial factors, if the base gave them up."""
    array = gather_to_host(field.get(value), module.index)
    if field.rank_dim is None:
        return array
    ranks = range(int(np.asarray(adapter.rank)[module.index]))
    array = array.take(ranks, axis=field.rank_dim)
    if not isinstance(value, LoRA) or value.first_down is None or value.first_up is None:
        return array
    initial = gather_to_host(value.first_down if field.rank_dim == 0 else -value.first_up, module.index)
    return np.concatenate([array, initial.take(ranks, field.rank_dim)], axis=field.rank_dim)


def _join_parts(field: PeftTensor, parts: _ModuleParts) -> np.ndarray:
    """Join the arrays of a fused module's parts into one tensor."""
    arrays = {part: _get_layer_array(field, *layer) for part, layer in parts.items()}
    module, adapter, _ = next(iter(parts.values()))
    if len(module.mapping.parts) == 1:
        return arrays[0]
    if not isinstance(adapter, LoRA | DoRA):
        if field.has_rows:
            return _join_rows(module, arrays)
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
    return _join_rows(module, arrays)


def _sum_parts(field: PeftTensor, parts: _ModuleParts) -> np.ndarray:
    """Join the gradients of a fused module's parts, summed for an array that they share."""
    arrays = {part: _get_layer_array(field, *layer) for part, layer in parts.items()}
    module = next(iter(parts.values()))[0]
    return _join_rows(module, arrays) if field.has_rows else sum(arrays.values(), start=np.zeros((), np.float32))


def _join_rows(module: PeftModule, arrays: Mapping[int, np.ndarray]) -> np.ndarray:
    """Concatenate the rows of parts in the layout of the fused weight, with zeros for a part without the adapter."""
    first = next(iter(arrays.values()))
    joined = np.zeros((sum(module.part_sizes), *first.shape[1:]), first.dtype)
    shapes = [(size, *first.shape[1:]) for size in module.part_sizes]
    for part, view in enumerate(TensorMapping(module.mapping.parts, module.mapping.groups).views(joined, shapes, 0)):
        if part in arrays:
            view[...] = arrays[part].reshape(view.shape)
    return joined


def _keep_largest_shared(
    tensors: Mapping[str, np.ndarray], vera: VeRA, index: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Return VeRA's shared A and B: those of this layer if they are larger than the ones collected so far. Each layer
    has a slice of the largest."""
    arrays = {name: gather_to_host(get(vera), index) for name, get in VERA_SHARED.items()}
    is_larger = lambda name, x: name not in tensors or x.size > tensors[name].size
    return {name: x if is_larger(name, x) else tensors[name] for name, x in arrays.items()}


def _build_adapter_config(model: Any, adapter_name: str) -> dict[str, Any]:
    """Build adapter_config.json."""
    table = get_name_table(model)
    by_module = _group_by_module(model, None, table, adapter_name)
    if not by_module:
        raise CheckpointError(
            f"{adapter_name!r} has parameters trained in full only: zoo.save writes them with the model"
        )
    _, base_options = base_tensors.collect_base_tensors(model, None, table, adapter_name, set(by_module))
    adapters = {name: next(iter(parts.values())) for name, parts in by_module.items()}
    _, adapter, _ = next(iter(adapters.values()))
    config: dict[str, Any] = {
        "base_model_name_or_path": None,
        "fan_in_fan_out": any(module.mapping.transposed for module, _, _ in adapters.values()),
        "inference_mode": True,
        "modules_to_save": base_options["modules_to_save"],
        "target_modules": sorted(adapters),
        "task_type": "CAUSAL_LM",
    }
    if base_options["bias"] != "none" and not isinstance(adapter, LoRA | DoRA | EmbeddingLoRA):
        raise CheckpointError(f"biases are trained with {type(adapter).__name__}, which PEFT's files do not have")
    match adapter:
        case IA3():
            inputs = sorted(name for name, (_, ia3, _) in adapters.items() if ia3.of_in is not None)
            return config | {"peft_type": "IA3", "feedforward_modules": inputs, "init_ia3_weights": True}
        case VeRA():
            return config | {"peft_type": "VERA", "r": adapter.down_scale.shape[-1], "bias": "none"} | {
                "save_projection": True, "projection_prng_key": 0, "vera_dropout": 0.0, "d_initial": 0.1,
                "init_weights": True,
            }  # fmt: skip
        case LoHa() | LoKr():
            return config | _build_lycoris_config(adapters)
        case OFT():
            return config | build_oft_config(adapters)
        case AdaLoRA():
            return config | build_adalora_config(adapters)
    ranks = {
        name: len(_join_parts(list_peft_tensors(adapters[name][1])[0], parts)) for name, parts in by_module.items()
    }
    alphas = {name: _get_module_scale(parts) * ranks[name] for name, parts in by_module.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    dropout_rates = [lora.dropout for _, lora, _ in adapters.values() if isinstance(lora, LoRA | DoRA)]
    return config | {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "bias": base_options["bias"],
        "lora_dropout": max(dropout_rates, default=0.0),
        "use_dora": any(isinstance(lora, DoRA) for _, lora, _ in adapters.values()),
        "use_rslora": False,
        "init_lora_weights": True,
    }


def _build_lycoris_config(adapters: Mapping[str, tuple[PeftModule, Any, Any]]) -> dict[str, Any]:
    """Build the config of a LoHa or LoKr. The scale is stored as alpha / rank, for any rank."""
    _, adapter, _ = next(iter(adapters.values()))
    down = adapter.down if isinstance(adapter, LoHa) else adapter.right_down
    rank = 1 if down is None else down.shape[-2]
    scales = {name: float(np.asarray(adapter.scale)[module.index]) for name, (module, adapter, _) in adapters.items()}
    alphas = {
        name: int(scale * rank) if (scale * rank).is_integer() else scale * rank for name, scale in scales.items()
    }
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    return {
        "peft_type": type(adapter).__name__.upper(),
        "r": rank,
        "alpha": alpha,
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "rank_pattern": {},
        "init_weights": True,
    }


def _get_module_scale(parts: _ModuleParts) -> float | int:
    """Return alpha / rank of one module. **Raises** `CheckpointError` if the parts of a fused module differ."""
    scales = {float(np.asarray(adapter.scale)[module.index]) for module, adapter, _ in parts.values()}
    if len(scales) > 1:
        peft_name = next(iter(parts.values()))[0].peft_name
        raise CheckpointError(
            f"{peft_name} is one module in PEFT's files, and its parts are scaled by {sorted(scales)}"
        )
    scale = scales.pop()
    return int(scale) if scale.is_integer() else scale
