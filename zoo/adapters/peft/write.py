"""Write PEFT's files: adapter_config.json and adapter_model.safetensors."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zoo._files import create_files
from zoo.models.hf.spec import NameMap
from zoo.models.targets import find_linears
from zoo.parallel import merge_rounds
from zoo.weights import CheckpointError
from zoo.weights.safetensors import write_tensors

from ..compose import adapter_names, check_adapter_name, is_adapter
from ..merged_layers import restore_adapters
from ..methods.adalora import AdaLoRA
from ..methods.dora import DoRA
from ..methods.embedding import EmbeddingLoRA
from ..methods.ia3 import IA3
from ..methods.lora import LoRA
from ..methods.lycoris import LoHa, LoKr
from ..methods.oft import OFT
from ..methods.vera import VeRA
from ..names import (
    PREFIX,
    WEIGHTS_FILE,
    PeftModule,
    get_name_table,
    list_peft_modules,
    list_peft_tensors,
    nest_parameters,
)
from . import base_tensors
from .build_config import build_lycoris_config, refuse_fused_vera
from .config import CONFIG_FILE
from .join import Experts, get_joined_rank, join_experts, join_parts, keep_largest_shared, sum_parts
from .methods import build_adalora_config, build_oft_config
from .tying import add_head_tensors, build_tying_config, find_tied_modules


def save(model: Any, directory: str | Path, *, adapter_name: str | None = None, base: str | Path | None = None) -> None:
    """Save one adapter in PEFT's format.

    - `adapter_name`: required if the model has several adapters.
    - `base`: directory or name of the base model, for PEFT's `base_model_name_or_path`. Default: the name that its
      config.json has, if any.

    An adapter that was initialized with a part of its base's weight (PiSSA, OLoRA) is saved as the update of the
    original base, which has twice the rank.

    LoRAs of experts are saved as `target_parameters`, where the modules of transformers 5 have all experts in one.

    For a fused projection, the parts are saved as one adapter of the same rank while they share A. Once training has
    changed A, their ranks are concatenated, which is equivalent.

    An embedding that is tied to the head is saved with `ensure_weight_tying`, with which PEFT (0.21 or later, for a
    LoRA of it) trains both as one.

    **Raises** `CheckpointError` for a model without such an adapter, and for what PEFT does not have: a method, a
    strength of methods other than LoRA, a tied embedding that is trained in full beside such a method.
    """
    adapter_name = _resolve_adapter_name(model, adapter_name)
    model = merge_rounds(restore_adapters(model))
    tensors = collect_tensors(model, adapter_name=adapter_name)
    config = _build_adapter_config(model, adapter_name, _name_base(model) if base is None else os.fspath(base))
    config = build_tying_config(config, find_tied_modules(model))
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    shapes = {name: (array.shape, array.dtype) for name, array in tensors.items()}
    with create_files(path) as create:
        write_tensors(create(WEIGHTS_FILE), shapes, tensors.__getitem__)
        create(CONFIG_FILE).write((json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _name_base(model: Any) -> str | None:
    """Return the name that the base model's config.json has, as files of transformers before 5 do; else None.

    The directory that a model was loaded from is not among its static fields: two models of one architecture would be
    two programs, or take over each other's name.
    """
    origin = getattr(model, "origin", None)
    name = None if origin is None else json.loads(origin.config).get("_name_or_path")
    return name if isinstance(name, str) and name else None


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
    (model, tree), tensors = merge_rounds((model, tree)), {}
    table = _choose_name_table(model, adapter_name)
    by_module = _group_by_module(model, tree, table, adapter_name)
    combine_parts = partial(join_parts, model=model) if tree is None else sum_parts
    for peft_name, experts in by_module.items():
        module, adapter, value = _get_first(experts)
        for field in list_peft_tensors(adapter):
            arrays = {expert: combine_parts(field, parts) for expert, parts in experts.items()}
            array = join_experts(field, module, arrays) if module.holds_experts else arrays[0]
            tensors[f"{PREFIX}{peft_name}.{field.suffix}"] = array
        if isinstance(adapter, VeRA) and tree is None:
            tensors |= keep_largest_shared(tensors, value, module.index)
    of_base, _ = base_tensors.collect_base_tensors(model, tree, table, adapter_name, set(by_module))
    tensors |= {PREFIX + name: array for name, array in of_base.items()}
    return dict(sorted(add_head_tensors(tensors, find_tied_modules(model)).items()))


def _choose_name_table(model: Any, adapter_name: str) -> NameMap:
    """Return the tensor names of the model's family: those in memory if a LoRA wraps experts, since transformers 5 has
    all experts in one parameter."""
    adapted = [_find_adapter(site.module, adapter_name) for site in find_linears(model) if len(site.ranges) > 1]
    return get_name_table(model, in_memory=any(isinstance(adapter, LoRA) for adapter in adapted))


def _group_by_module(model: Any, tree: Any, table: NameMap, adapter_name: str) -> Mapping[str, Experts]:
    """Group the layers that have the adapter by PEFT module, expert and part. **Raises** `CheckpointError` for a layer
    that PEFT has no module for."""
    sites = find_linears(model if tree is None else tree, include_embeddings=True)
    values = {site.identity: site.module for site in sites}
    adapted: list[tuple[PeftModule, Any]] = []
    modules = list(list_peft_modules(model, table))
    for module in modules:
        adapter = _find_adapter(module.site.module, adapter_name)
        if adapter is not None and bool(np.asarray(adapter.has_adapter)[module.index]):
            adapted.append((module, adapter))
            _refuse_unwritable(module, adapter)
    known = {module.site.identity for module in modules}
    for site in find_linears(model, include_embeddings=True):
        if site.identity not in known and _find_adapter(site.module, adapter_name) is not None:
            raise CheckpointError(f"{site.name} has an adapter, and no module of its own in PEFT's files")
    by_module: dict[str, dict[int, dict[int, tuple[PeftModule, Any, Any]]]] = {}
    for module, (_, adapter) in zip(nest_parameters([module for module, _ in adapted]), adapted, strict=True):
        value = _find_adapter(values[module.site.identity], adapter_name)
        experts = by_module.setdefault(module.peft_name, {})
        expert = module.index[-1] if module.holds_experts else 0
        experts.setdefault(expert, {})[module.part] = module, adapter, value
    return by_module


def _refuse_unwritable(module: PeftModule, adapter: Any) -> None:
    """**Raises** `CheckpointError` for an adapter that PEFT does not have for such a module."""
    if module.holds_experts and not isinstance(adapter, LoRA):
        raise CheckpointError(
            f"{module.parameter} holds all experts, for which PEFT has LoRA only, not {type(adapter).__name__}"
        )
    if isinstance(adapter, VeRA):
        refuse_fused_vera(module, WEIGHTS_FILE)


def _refuse_strength(module: PeftModule, adapter: Any) -> None:
    """**Raises** `CheckpointError` for a strength that PEFT's files cannot hold: theirs is the factor of a LoRA."""
    strength = np.asarray(adapter.strength)[module.index]
    if strength != 1 and not isinstance(adapter, LoRA | EmbeddingLoRA):
        raise CheckpointError(
            f"the adapter {adapter.adapter_name!r} has the strength {strength:g}, and PEFT's files of "
            f"{type(adapter).__name__} hold no factor: save it at strength 1 (adapters.set_strength), or merge it"
        )


def _get_first(experts: Experts) -> tuple[PeftModule, Any, Any]:
    return next(iter(next(iter(experts.values())).values()))


def _find_adapter(node: Any, adapter_name: str) -> Any:
    """Return the adapter of this name among those of one layer, or None."""
    while is_adapter(node) and node.adapter_name != adapter_name:
        node = node.base
    return node if is_adapter(node) else None


def _build_adapter_config(model: Any, adapter_name: str, base: str | None) -> dict[str, Any]:
    """Build adapter_config.json."""
    table = _choose_name_table(model, adapter_name)
    by_module = _group_by_module(model, None, table, adapter_name)
    if not by_module:
        raise CheckpointError(
            f"{adapter_name!r} has parameters trained in full only: zoo.save writes them with the model"
        )
    _, base_options = base_tensors.collect_base_tensors(model, None, table, adapter_name, set(by_module))
    adapters = {name: _get_first(experts) for name, experts in by_module.items()}
    for module, written, _ in adapters.values():
        _refuse_strength(module, written)
    _, adapter, _ = next(iter(adapters.values()))
    parameters = _list_target_parameters(adapters)
    config: dict[str, Any] = {
        "base_model_name_or_path": base,
        "fan_in_fan_out": any(
            module.mapping.transposed and not module.holds_experts for module, _, _ in adapters.values()
        ),
        "inference_mode": True,
        "modules_to_save": base_options["modules_to_save"],
        "target_modules": sorted(adapters.keys() - parameters.keys()),
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
            return config | build_lycoris_config(adapters)
        case OFT():
            return config | build_oft_config(adapters)
        case AdaLoRA():
            return config | build_adalora_config(adapters)
    ranks = {
        parameters.get(name, name): max(get_joined_rank(parts) for parts in experts.values())
        for name, experts in by_module.items()
    }
    alphas = {
        (key := parameters.get(name, name)): _get_module_scale(name, experts) * ranks[key]
        for name, experts in by_module.items()
    }
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    dropout_rates = [lora.dropout for _, lora, _ in adapters.values() if isinstance(lora, LoRA | DoRA)]
    if parameters:  # PEFT has no dropout there, and reads no file that asks for it
        config["target_parameters"], dropout_rates = sorted(parameters.values()), []
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


def _list_target_parameters(adapters: Mapping[str, tuple[PeftModule, Any, Any]]) -> dict[str, str]:
    """Map the modules that hold a parameter of `target_parameters` to its name: all experts, and their routers, whose
    module is no Linear where experts are one parameter."""
    modules = {name: module for name, (module, _, _) in adapters.items()}
    if not any(module.holds_experts for module in modules.values()):
        return {}
    holders = {name: module.parameter for name, module in modules.items() if module.holds_experts}
    routers = {name: f"{name}.weight" for name, module in modules.items() if ".router." in module.site.name}
    if any(isinstance(adapter, DoRA) for _, adapter, _ in adapters.values()):
        raise CheckpointError("use_dora and target_parameters, all experts in one, exclude each other in PEFT's files")
    return holders | routers


def _get_module_scale(peft_name: str, experts: Experts) -> float | int:
    """Return alpha / rank of one module, times the strength. **Raises** `CheckpointError` if its experts, or the parts
    of a fused module, differ."""
    layers = [layer for parts in experts.values() for layer in parts.values()]
    factors = [np.asarray(adapter.scale) * np.asarray(adapter.strength) for _, adapter, _ in layers]
    scales = {float(factor[module.index]) for factor, (module, _, _) in zip(factors, layers, strict=True)}
    if len(scales) > 1:
        raise CheckpointError(
            f"{peft_name} is one module in PEFT's files, and its parts are scaled by {sorted(scales)}"
        )
    scale = scales.pop()
    return int(scale) if scale.is_integer() else scale
