"""Resolve a checkpoint before reading it: its family, its model in shapes, and the tensor behind each parameter."""

import dataclasses
import json
import logging
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from zoo.models.hf.config import read_config
from zoo.models.hf.errors import ConfigError, shorten_repr, suggest_nearest
from zoo.models.hf.families import ALIASES, FAMILIES, get_family
from zoo.models.hf.not_read import find_nearest, find_reason
from zoo.models.hf.score_head import choose_head
from zoo.models.hf.shapes import build_shapes
from zoo.models.hf.spec import Config, Family, NameMap, Origin, replace_ending
from zoo.models.hf.wrappers import TEXT_CONFIG, TIE, WRAPPERS, read_text_config, rename, rename_all, unwrap_config
from zoo.models.parameter_paths import list_parameter_paths

from .directory import CONFIG_NAME, resolve_directory
from .formats import QUANTIZATION_KEY, split_quantization
from .formats.lazy import dequantize_lazily
from .formats.pack import list_packed, pack_model
from .left_aside import describe_left_aside, split_left_aside
from .packed import unpack_mxfp4
from .plan import (
    TensorPlan,
    drop_tensors,
    find_mapping,
    invert_name_map,
    list_callers,
    list_copies,
    plan_tensors,
    strip_base_prefix_if_absent,
)
from .safetensors import CheckpointError, LazyTensor, find_stray_index, open_tensors, read_json
from .sentence_files import read_sentence_files
from .tokenizer_files import has_tokenizer

_logger = logging.getLogger("zoo")
_MAX_LISTED = 20
_MAX_MISSING = 10_000
_MOST_SHARED_LAYERS = 128
"""Most layers of a checkpoint with fewer tensors than layers, which share them."""


LoadedModel = Any
"""A `zoo.models.Decoder`, `SequenceScore`, `Encoder` or, of images, `ImageEncoder`: the config says which."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose tensor names and shapes agree with its config. No tensor has been read yet."""

    location: str
    """Its name in error messages."""
    family: Family
    config: Config
    model: LoadedModel
    """The model in shapes only."""
    name_map: NameMap
    tensor_plans: Mapping[str, TensorPlan]
    """The tensors that hold the model's parameters."""
    tensors: Mapping[str, LazyTensor]
    """The tensors in the files, except tensors that are left aside."""
    tied: tuple[str, str] | None
    """Tied weights that are stored twice: the names of the head and of the embedding it must equal. Else None."""


def open_checkpoint(
    directory: str | Path, family: Family | None = None, ignore: Collection[str] = (), packed: bool = False
) -> Checkpoint:
    """Resolve a checkpoint directory from its config and safetensors headers. Packed matrices stay packed if `packed`,
    and are decoded otherwise.

    **Raises** `CheckpointError` as `load` does, except for what only the tensors' data can show.
    """
    path = resolve_directory(directory)
    config = read_json(path / CONFIG_NAME)
    if family is None:
        family = find_family(config, path / CONFIG_NAME)
    location = f"{path / CONFIG_NAME}: "
    tensors = open_tensors(path)
    stray = find_stray_index(path)
    try:
        found = resolve_checkpoint(config, tensors, family, ignore, location, str(path), packed)
    except CheckpointError as error:
        if not stray:
            raise
        raise CheckpointError(f"{error}\n  {stray}") from None
    if stray:
        _logger.warning("%s", stray)
    origin = dataclasses.replace(
        found.model.origin, sentence_files=read_sentence_files(path), has_tokenizer=has_tokenizer(path)
    )
    return dataclasses.replace(found, model=dataclasses.replace(found.model, origin=origin))


def find_family(config: Mapping[str, Any], path: Path) -> Family:
    """Return the family that the config's `model_type` names, by its name or an alias. For a multimodal checkpoint,
    return the family of its language model.

    **Raises** `CheckpointError` for an unknown `model_type`, with the reason why it is not read and the nearest family
    that is, or the nearest known name.
    """
    try:
        text = read_text_config(config)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    name = text.get("model_type")
    if isinstance(name, str) and (family := get_family(name)) is not None:
        return family
    if name is not None:
        problem = f"has the model_type {shorten_repr(name)}"
    else:
        problem = "has no model_type"
    hint = ""
    if isinstance(name, str):
        hint = suggest_nearest(name, [*FAMILIES, *ALIASES, *WRAPPERS])
    wraps = name != config.get("model_type")
    if wraps:
        problem = f"wraps a language model that {problem}"
    if reason := find_reason(name):
        hint = f", which is not read: {reason}"
        if nearest := find_nearest(name):
            hint += f". The nearest family that is read is {nearest!r}"
    elif TEXT_CONFIG in config and not wraps:
        hint = f". Language models are read out of {', '.join(WRAPPERS)}"
    raise CheckpointError(
        f"{path} {problem}{hint}{'' if hint.endswith('?') else '.'} `zoo families` lists what is read"
    )


def resolve_checkpoint(
    config_json: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    family: Family,
    ignore: Collection[str],
    config_location: str,
    location: str,
    packed: bool = False,
) -> Checkpoint:
    """Build the config's model in shapes, plan which tensor each parameter is read from, and check names and shapes.

    **Raises** `CheckpointError` where config and tensors disagree.
    """
    config_json = {key: value for key, value in config_json.items() if key not in ignore}
    decode = False
    if isinstance(text := config_json.get(TEXT_CONFIG), Mapping):
        config_json[TEXT_CONFIG] = {key: value for key, value in text.items() if key not in ignore}
    try:
        family = choose_head(family, config_json)
        config_json, wrapping = unwrap_config(config_json, family, tensors)
        plain_json, quantized = split_quantization(config_json)
        if not packed:
            config_json = plain_json
        config = read_config(family, plain_json)
        if config.get(QUANTIZATION_KEY) is None and packed and quantized is None:
            raise ConfigError(
                f"packed=True, and without a {QUANTIZATION_KEY} nothing in the checkpoint is packed: leave it out"
            )
        if config.get(QUANTIZATION_KEY) is not None and not packed:
            config_json = {key: value for key, value in config_json.items() if key != QUANTIZATION_KEY}
            config = read_config(family, config_json)
            decode = True
        layers = config.get("num_hidden_layers", 0)  # a family of one's own may have another key
        # refused here: building 10^9 layers, if only in shapes, would never end
        if layers > max(len(tensors), _MOST_SHARED_LAYERS):
            raise ConfigError(f"num_hidden_layers = {layers}, and the checkpoint has {len(tensors)} tensors in all")
        model = build_shapes(family, config)
        name_map = rename_all(family.names(config), wrapping)
    except ValueError as error:  # an invalid key, or sizes that do not fit together
        raise CheckpointError(f"{config_location}{error}") from None
    tensors, aside = split_left_aside(tensors, family, config, wrapping)
    older_names = tuple(name for name in tensors if replace_ending(name, family.older_endings) != name)
    for name in older_names:
        if (newer := replace_ending(name, family.older_endings)) in tensors:
            raise CheckpointError(f"{location}: {name} and {newer} are one tensor, by two names: leave one of them out")
    tensors = {replace_ending(name, family.older_endings): tensor for name, tensor in tensors.items()}
    if decode:
        tensors = unpack_mxfp4(tensors, location)
    if not (quantized is None or packed):
        tensors = dequantize_lazily(tensors, quantized, location)
    if wrapping is not None:
        stripped = None
    else:
        stripped = strip_base_prefix_if_absent(name_map, set(tensors))
    if stripped is not None:
        name_map = stripped
    side_tensors = ""
    if quantized is not None and packed:
        model, tensors, side_tensors = pack_model(model, name_map, tensors, quantized, location)
    _check_tensor_count(model, name_map, len(tensors), location)
    tensor_plans = plan_tensors(model, name_map)
    optional = {name for name in tensor_plans if any(re.search(regex, name) for regex in family.optional_tensors)}
    lacking = () if optional & tensors.keys() else tuple(sorted(optional))
    tensor_plans = drop_tensors(tensor_plans, lacking)
    origin = Origin(
        family,
        json.dumps(config_json),
        lacks_base_prefix=stripped is not None,
        packed=list_packed(model),
        side_tensors=side_tensors,
        older_names=older_names,
        wrapping=wrapping,
        lacking=lacking,
        left_aside=describe_left_aside(aside),
    )
    model = dataclasses.replace(model, origin=origin)
    head, embedding = (rename(f"{module}.weight", wrapping) for module in (family.head, family.embedding))
    always_ties = family.required_values.get(TIE) == (True,)
    is_tied_head_stored = config.get(TIE, always_ties) and {head, embedding} <= tensors.keys()
    callers = list_callers(family, config, lacks_base_prefix=stripped is not None)
    allowed = list_copies(tensor_plans, callers)
    tied = None
    if is_tied_head_stored:
        tied = head, embedding
        allowed.append(head)
    _check_tensors(tensor_plans, tensors, family, location, allowed)
    return Checkpoint(location, family, config, model, name_map, tensor_plans, tensors, tied)


def _check_tensor_count(model: LoadedModel, name_map: NameMap, available: int, location: str) -> None:
    """**Raises** `CheckpointError` for a config of far more tensors than the files have, say 10^9 experts: the list of
    missing ones would never end."""
    mappings = invert_name_map(name_map)
    for path in list_parameter_paths(model):
        pattern, _, _ = find_mapping(path, mappings)
        count = math.prod(map(len, path.ranges[: pattern.count("*")]))
        if count > available + _MAX_MISSING:
            raise CheckpointError(
                f"{location}: the config asks for {count:,} tensors {pattern}, and the files have {available:,} in all"
            )


def _check_tensors(
    tensor_plans: Mapping[str, TensorPlan],
    tensors: Mapping[str, LazyTensor],
    family: Family,
    location: str,
    allowed: Collection[str],
) -> None:
    """**Raises** `CheckpointError` that lists every tensor that is missing, unexpected, or of another shape."""
    problems = []
    unexpected = tensors.keys() - tensor_plans.keys() - set(allowed)
    for number, name in enumerate(sorted(tensor_plans.keys() - tensors.keys())):
        hint = suggest_nearest(name, unexpected) if number < _MAX_LISTED else ""
        problems.append(f"{name} {list(tensor_plans[name].shape)} is missing{hint}")
    for name in unexpected:
        if not any(re.search(pattern, name) for pattern in family.ignored_tensors):
            problems.append(f"{name} {list(tensors[name].shape)} has no place in the model")
    for name in tensor_plans.keys() & tensors.keys():
        if tensors[name].shape != tensor_plans[name].shape:
            stored = list(tensors[name].shape)
            expected = list(tensor_plans[name].shape)
            problems.append(f"{name} is {stored} in the file, and the config asks for {expected}")
    if problems:
        listed = "\n  ".join(sorted(problems)[:_MAX_LISTED])
        if len(problems) > _MAX_LISTED:
            more = f"\n  and {len(problems) - _MAX_LISTED} more"
        else:
            more = ""
        raise CheckpointError(
            f"{location} does not hold the {family.name} that its config describes:\n  {listed}{more}"
        )
