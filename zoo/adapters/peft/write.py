"""PEFT's files out: adapter_config.json and adapter_model.safetensors."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zoo.models.hf.spec import NameMap, TensorMapping
from zoo.weights import CheckpointError
from zoo.weights.safetensors import write_safetensors
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
"""Of one of their modules, which part it is -> its place, our adapter, and what the arrays are taken from."""


def save(model: Any, directory: str | Path, *, adapter_name: str | None = None) -> None:
    """Write one adapter as PEFT reads it.

    - `label`: which of several; the only one unless given.

    An adapter that started with a part of its base's matrix is written as the change from what that was: of twice the
    rank, and for the base as it was read.

    Parts of a fused projection that still share their A are written as one adapter of its rank. Where they have drifted
    apart, as training lets them, their ranks are put one after another, which computes the same.

    **Raises** `CheckpointError` for a model without such an adapter, and for one whose kind PEFT's files do not have.
    """
    adapter_name = _resolve_adapter_name(model, adapter_name)
    found = collect_tensors(model, adapter_name=adapter_name)
    config = _build_adapter_config(model, adapter_name)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    shapes = {name: (numbers.shape, numbers.dtype) for name, numbers in found.items()}
    try:
        write_safetensors(path / f"{WEIGHTS_FILE}.partial", shapes, found.__getitem__)
        (path / f"{CONFIG_FILE}.partial").write_text(
            json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
    except BaseException:
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            (path / f"{name}.partial").unlink(missing_ok=True)
        raise
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        os.replace(path / f"{name}.partial", path / name)


def _resolve_adapter_name(model: Any, adapter_name: str | None) -> str:
    try:
        check_adapter_name(model, adapter_name)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    there = adapter_names(model)
    if adapter_name is None and len(there) > 1:
        raise CheckpointError(f"the model has several adapters, {', '.join(there)}: name one with adapter_name=")
    return there[0] if adapter_name is None else adapter_name


def collect_tensors(model: Any, tree: Any = None, *, adapter_name: str) -> dict[str, np.ndarray]:
    """An adapter's arrays by PEFT's names: those of `model`, or what a tree of its shape has in their places: of
    gradients, those of parts that share an array are added up."""
    found: dict[str, np.ndarray] = {}
    table = get_name_table(model)
    by_module = _group_by_module(model, tree, table, adapter_name)
    for theirs, parts in by_module.items():
        for field in list_peft_tensors(next(iter(parts.values()))[1]):
            put_together = _join_parts if tree is None else _sum_parts
            found[f"{PREFIX}{theirs}.{field.suffix}"] = put_together(field, parts)
        _, adapter, value = next(iter(parts.values()))
        if isinstance(adapter, VeRA) and tree is None:
            found |= _keep_largest_shared(found, value, next(iter(parts.values()))[0].index)
    of_base, _ = base_tensors.collect_base_tensors(model, tree, table, adapter_name, set(by_module))
    return dict(sorted((found | {PREFIX + name: numbers for name, numbers in of_base.items()}).items()))


def _group_by_module(
    model: Any, tree: Any, table: NameMap, adapter_name: str
) -> dict[str, dict[int, tuple[PeftModule, Any, Any]]]:
    """Their module -> its parts."""
    values = {
        found.identity: found.module for found in find_linears(model if tree is None else tree, include_embeddings=True)
    }
    found: dict[str, dict[int, tuple[PeftModule, Any, Any]]] = {}
    for module in list_peft_modules(model, table):
        adapter = _find_adapter(module.site.module, adapter_name)
        if adapter is not None and _has_adapter(adapter, module.index):
            value = _find_adapter(values[module.site.identity], adapter_name)
            found.setdefault(module.peft_name, {})[module.part] = module, adapter, value
    return found


def _find_adapter(node: Any, adapter_name: str) -> Any:
    """The adapter of this name, of those around one matrix."""
    while is_adapter(node) and node.adapter_name != adapter_name:
        node = node.base
    return node if is_adapter(node) else None


def _has_adapter(adapter: Any, index: tuple[int, ...]) -> bool:
    """Whether one layer has it."""
    counts = adapter.rank if isinstance(adapter, LoRA | DoRA | EmbeddingLoRA) else adapter.applies
    return bool(np.asarray(counts)[index])


def _get_layer_array(field: PeftTensor, module: PeftModule, adapter: Any, value: Any) -> np.ndarray:
    """One layer's array, of its own rank."""
    numbers = gather_to_host(field.get(value), module.index)
    if field.rank_dim is None:
        return numbers
    ranks = range(int(np.asarray(adapter.rank)[module.index]))
    numbers = numbers.take(ranks, axis=field.rank_dim)
    if not isinstance(value, LoRA) or value.first_down is None or value.first_up is None:
        return numbers
    first = gather_to_host(value.first_down if field.rank_dim == 0 else -value.first_up, module.index).take(
        ranks, field.rank_dim
    )
    return np.concatenate([numbers, first], axis=field.rank_dim)


def _join_parts(field: PeftTensor, parts: _ModuleParts) -> np.ndarray:
    """The array of a whole module of theirs."""
    arrays = {part: _get_layer_array(field, *one) for part, one in parts.items()}
    module, adapter, _ = next(iter(parts.values()))
    if len(module.mapping.parts) == 1:
        return arrays[0]
    if not isinstance(adapter, LoRA | DoRA):
        if field.has_rows:
            return _join_rows(module, arrays)
        if any(not np.array_equal(x, next(iter(arrays.values()))) for x in arrays.values()):
            raise CheckpointError(
                f"{module.peft_name} has one {field.suffix} in PEFT's files, and its parts have several"
            )
        return next(iter(arrays.values()))
    downs = {part: _get_layer_array(list_peft_tensors(adapter)[0], *one) for part, one in parts.items()}
    distinct = {down.tobytes(): down for down in downs.values()}
    if field.rank_dim == 0:
        return np.concatenate(list(distinct.values()))
    if field.rank_dim == 1:
        starts = dict(zip(distinct, np.cumsum([0, *map(len, distinct.values())]), strict=False))
        total = sum(map(len, distinct.values()))
        for part, up in arrays.items():
            first = starts[downs[part].tobytes()]
            arrays[part] = np.zeros((len(up), total), up.dtype)
            arrays[part][:, first : first + up.shape[1]] = up
    return _join_rows(module, arrays)


def _sum_parts(field: PeftTensor, parts: _ModuleParts) -> np.ndarray:
    """The gradient of a whole module's array, its parts sharing what has no rows."""
    arrays = {part: _get_layer_array(field, *one) for part, one in parts.items()}
    module = next(iter(parts.values()))[0]
    return _join_rows(module, arrays) if field.has_rows else sum(arrays.values(), start=np.zeros((), np.float32))


def _join_rows(module: PeftModule, arrays: Mapping[int, np.ndarray]) -> np.ndarray:
    """Rows of parts put together as those of the matrix are; zeros for a part that has no adapter."""
    one = next(iter(arrays.values()))
    whole = np.zeros((sum(module.part_sizes), *one.shape[1:]), one.dtype)
    shapes = [(size, *one.shape[1:]) for size in module.part_sizes]
    for part, view in enumerate(TensorMapping(module.mapping.parts, module.mapping.groups).views(whole, shapes, 0)):
        if part in arrays:
            view[...] = arrays[part].reshape(view.shape)
    return whole


def _keep_largest_shared(found: Mapping[str, np.ndarray], vera: VeRA, index: tuple[int, ...]) -> dict[str, np.ndarray]:
    """VeRA's shared arrays, of which every matrix has as much as it needs: those of the largest."""
    for_this = {name: gather_to_host(get(vera), index) for name, get in VERA_SHARED.items()}
    return {name: x if name not in found or x.size > found[name].size else found[name] for name, x in for_this.items()}


def _build_adapter_config(model: Any, adapter_name: str) -> dict[str, Any]:
    """What PEFT has to know of an adapter."""
    table = get_name_table(model)
    by_module = _group_by_module(model, None, table, adapter_name)
    if not by_module:
        raise CheckpointError(
            f"{adapter_name!r} is no adapter around matrices: whole parameters alone are zoo.save's to write"
        )
    _, beside = base_tensors.collect_base_tensors(model, None, table, adapter_name, set(by_module))
    adapters = {theirs: next(iter(parts.values())) for theirs, parts in by_module.items()}
    _, adapter, _ = next(iter(adapters.values()))
    config: dict[str, Any] = {
        "base_model_name_or_path": None,
        "fan_in_fan_out": any(module.mapping.transposed for module, _, _ in adapters.values()),
        "inference_mode": True,
        "modules_to_save": beside["modules_to_save"],
        "target_modules": sorted(adapters),
        "task_type": "CAUSAL_LM",
    }
    if beside["bias"] != "none" and not isinstance(adapter, LoRA | DoRA | EmbeddingLoRA):
        raise CheckpointError(f"biases are learnt beside a {type(adapter).__name__}, which PEFT's files do not have")
    match adapter:
        case IA3():
            inputs = sorted(theirs for theirs, (_, ia3, _) in adapters.items() if ia3.of_in is not None)
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
        theirs: len(_join_parts(list_peft_tensors(adapters[theirs][1])[0], parts))
        for theirs, parts in by_module.items()
    }
    alphas = {theirs: _get_module_scale(parts) * ranks[theirs] for theirs, parts in by_module.items()}
    rank, alpha = (Counter(numbers.values()).most_common(1)[0][0] for numbers in (ranks, alphas))
    dropped = [one.dropout for _, one, _ in adapters.values() if isinstance(one, LoRA | DoRA)]
    return config | {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {theirs: own for theirs, own in ranks.items() if own != rank},
        "alpha_pattern": {theirs: own for theirs, own in alphas.items() if own != alpha},
        "bias": beside["bias"],
        "lora_dropout": max(dropped, default=0.0),
        "use_dora": any(isinstance(one, DoRA) for _, one, _ in adapters.values()),
        "use_rslora": False,
        "init_lora_weights": True,
    }


def _build_lycoris_config(adapters: Mapping[str, tuple[PeftModule, Any, Any]]) -> dict[str, Any]:
    """Of LoHa and LoKr, of whose scale the files know alpha and rank: any two that give it would do."""
    _, adapter, _ = next(iter(adapters.values()))
    narrow = adapter.down if isinstance(adapter, LoHa) else adapter.right_down
    rank = 1 if narrow is None else narrow.shape[-2]
    scales = {theirs: float(np.asarray(one.scale)[module.index]) for theirs, (module, one, _) in adapters.items()}
    alphas = {
        theirs: int(scale * rank) if (scale * rank).is_integer() else scale * rank for theirs, scale in scales.items()
    }
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    return {
        "peft_type": type(adapter).__name__.upper(),
        "r": rank,
        "alpha": alpha,
        "alpha_pattern": {theirs: own for theirs, own in alphas.items() if own != alpha},
        "rank_pattern": {},
        "init_weights": True,
    }


def _get_module_scale(parts: _ModuleParts) -> float | int:
    """alpha / rank of one module. **Raises** `CheckpointError` where its parts have several."""
    scales = {float(np.asarray(adapter.scale)[module.index]) for module, adapter, _ in parts.values()}
    if len(scales) > 1:
        theirs = next(iter(parts.values()))[0].peft_name
        raise CheckpointError(f"{theirs} is one module in PEFT's files, and its parts are scaled by {sorted(scales)}")
    scale = scales.pop()
    return int(scale) if scale.is_integer() else scale
