"""Write PEFT's files: adapter_config.json and adapter_model.safetensors."""

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zoo._files import create_files
from zoo.models.decoder import Decoder
from zoo.models.encoder_decoder import EncoderDecoder
from zoo.models.hf.spec import NameMap
from zoo.models.sequence_score import SequenceScore
from zoo.models.targets import find_linears
from zoo.parallel.rounds import merge_rounds
from zoo.weights.model_card import Training, describe_adapter, write_model_card
from zoo.weights.safetensors import CheckpointError, hold_array, write_tensors

from ..compose import adapter_names, check_adapter_name, is_adapter
from ..merged_layers import restore_adapters
from ..methods.state import list_state_names, remove_state
from ..methods.token_rows import TokenRows
from ..names import PeftModule, get_callers, get_family_name, get_name_table, list_peft_modules, nest_parameters
from ..peft_limits import find_limit
from . import base_tensors
from .build_config import build_config
from .config import CONFIG_FILE
from .join import Experts, get_first_layer, join_experts, join_parts, keep_largest_shared, sum_parts
from .methods import METHODS, get_method, list_peft_tensors, refuse_fused
from .prompts import build_prompt_config, build_rows_config, collect_prompt, collect_token_rows, find_token_rows
from .sharing import copy_calls, copy_targets
from .source import PREFIX, WEIGHTS_FILE
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

    The score of a `SequenceScore` is saved with its adapter, trained or frozen, as PEFT's task SEQ_CLS does.

    An embedding that is tied to the head is saved with `ensure_weight_tying`, with which PEFT (0.21 or later, for a
    LoRA of it) trains both as one.

    **Raises** `CheckpointError` for a model without such an adapter, and for what PEFT does not have: a method, a
    strength of methods other than LoRA, a tied embedding that is trained in full beside such a method.
    """
    write_adapter(model, directory, adapter_name=adapter_name, base=base, training=Training())


def write_adapter(
    model: Any,
    directory: str | Path,
    *,
    adapter_name: str | None = None,
    base: str | Path | None = None,
    training: Training,
) -> None:
    """Save one adapter as `save` does; `training` is for the model card."""
    adapter_name = _resolve_adapter_name(model, adapter_name)
    model = merge_rounds(restore_adapters(model))
    callers = get_callers(model)
    tensors = copy_calls(collect_tensors(model, adapter_name=adapter_name), callers)
    config = _build_adapter_config(model, adapter_name, _name_base(model) if base is None else os.fspath(base))
    if config["peft_type"] in {method.peft_type for method in METHODS.values()}:
        config = copy_targets(build_tying_config(config, find_tied_modules(model)), callers)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    with create_files(path) as create:
        write_tensors(create(WEIGHTS_FILE), {name: hold_array(array) for name, array in tensors.items()})
        create(CONFIG_FILE).write((json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
    name = config["base_model_name_or_path"]
    write_model_card(path, describe_adapter(config["peft_type"], name, config["task_type"], training))


def _name_base(model: Any) -> str | None:
    """Return the name that the base model's config.json has, as files of transformers before 5 do; else None.

    The directory that a model was loaded from is not among its static fields: two models of one architecture would be
    two programs, or take over each other's name.
    """
    origin = getattr(model, "origin", None)
    name = None if origin is None else json.loads(origin.config).get("_name_or_path")
    return name if isinstance(name, str) and name else None


def _resolve_adapter_name(model: Any, adapter_name: str | None) -> str:
    """Return the given name, or the name of the only adapter."""
    try:
        check_adapter_name(model, adapter_name)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    names = adapter_names(model)
    if adapter_name is None and len(names) > 1:
        raise CheckpointError(f"the model has several adapters, {', '.join(names)}: name one with adapter_name=")
    return names[0] if adapter_name is None else adapter_name


def collect_tensors(model: Any, tree: Any = None, *, adapter_name: str) -> dict[str, np.ndarray]:
    """Return an adapter's arrays by PEFT's tensor names: the arrays of `model`, or their gradients from a tree of its
    structure, summed over the parts of a fused module that share an array."""
    model, tree = merge_rounds((model, tree))
    if adapter_name in list_state_names(model):
        if adapter_name in adapter_names(remove_state(model)):
            raise CheckpointError(f"{adapter_name!r} is a trained state and more, which no file of PEFT's has")
        return collect_prompt(model, tree)
    tensors: dict[str, np.ndarray] = {}
    table = get_name_table(model, in_memory=True)
    by_module = _group_by_module(model, tree, table, adapter_name)
    combine_parts = partial(join_parts, model=model) if tree is None else sum_parts
    for peft_name, experts in by_module.items():
        module, adapter, value = get_first_layer(experts)
        for field in list_peft_tensors(adapter):
            arrays = {expert: combine_parts(field, parts) for expert, parts in experts.items()}
            if module.holds_experts:
                array = join_experts(field, module, arrays)
            else:
                array = arrays[0]
            tensors[f"{PREFIX}{peft_name}.{field.suffix}"] = array
        if tree is None:
            tensors.update(keep_largest_shared(tensors, get_method(adapter), value, module.index))
    of_base, _ = base_tensors.collect_base_tensors(model, tree, table, adapter_name, set(by_module))
    for name, array in of_base.items():
        tensors[PREFIX + name] = array
    tensors = add_head_tensors(tensors, find_tied_modules(model))
    if rows := find_token_rows(model, adapter_name):
        values = rows if tree is None else find_token_rows(tree, adapter_name)
        tensors |= collect_token_rows(model, rows, values, is_whole=not tensors)
    return dict(sorted(tensors.items()))


def _group_by_module(model: Any, tree: Any, table: NameMap, adapter_name: str) -> Mapping[str, Experts]:
    """Group the layers that have the adapter by PEFT module, expert and part. **Raises** `CheckpointError` for a layer
    that PEFT has no module for."""
    sites = find_linears(model if tree is None else tree, include_embeddings=True)
    values = {site.identity: site.module for site in sites}
    adapted: list[tuple[PeftModule, Any]] = []
    modules = list(list_peft_modules(model, table))
    family = get_family_name(model)
    for module in modules:
        adapter = _find_adapter(module.site.module, adapter_name)
        if adapter is not None and bool(np.asarray(adapter.has_adapter)[module.index]):
            adapted.append((module, adapter))
            _refuse_unwritable(module, adapter, family)
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


def _refuse_unwritable(module: PeftModule, adapter: Any, family: str) -> None:
    """**Raises** `CheckpointError` for an adapter that PEFT does not have for such a module."""
    if limit := find_limit(module, family, type(adapter).__name__):
        raise CheckpointError(f"{limit}: leave it out of targets=, or merge the adapter and save the model")
    refuse_fused(get_method(adapter), module, WEIGHTS_FILE)


def _find_adapter(node: Any, adapter_name: str) -> Any:
    """Return the adapter of this name among the adapters of one layer, or None."""
    while is_adapter(node) and (node.adapter_name != adapter_name or isinstance(node, TokenRows)):
        node = node.base
    return node if is_adapter(node) else None


def _build_adapter_config(model: Any, adapter_name: str, base: str | None) -> dict[str, Any]:
    """Build adapter_config.json."""
    common = {"base_model_name_or_path": base, "inference_mode": True, "task_type": _name_task(model)}
    if adapter_name in list_state_names(model):
        return {**common, "modules_to_save": None, **build_prompt_config(model)}
    table = get_name_table(model, in_memory=True)
    by_module = _group_by_module(model, None, table, adapter_name)
    rows = find_token_rows(model, adapter_name)
    of_base, base_options = base_tensors.collect_base_tensors(model, None, table, adapter_name, set(by_module))
    if not by_module and rows is not None and not of_base:
        return {**common, "modules_to_save": None, **build_rows_config(model, rows)}
    if not by_module:
        raise CheckpointError(
            f"{adapter_name!r} has parameters trained in full only: zoo.save writes them with the model"
        )
    config = build_config(by_module, family=get_family_name(model), bias=base_options["bias"])
    if rows is not None:
        config["trainable_token_indices"] = rows.ids.tolist()
        if config["peft_type"] != "LORA":
            raise CheckpointError(f"PEFT's files have rows of tokens with a LoRA, and not with {config['peft_type']}")
    return {**common, "modules_to_save": base_options["modules_to_save"], **config}


def _name_task(model: Any) -> str | None:
    """Return the task that PEFT's class for this model has. None for an encoder, which PEFT wraps as any module."""
    if isinstance(model, SequenceScore):
        return "SEQ_CLS"
    if isinstance(model, EncoderDecoder):
        return "SEQ_2_SEQ_LM"
    return "CAUSAL_LM" if isinstance(model, Decoder) else None
