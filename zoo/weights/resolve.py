"""Resolve a checkpoint before reading it: its family, its model in shapes, and the tensor behind each parameter."""

import dataclasses
import json
import logging
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from zoo.models.encoder_decoder import EncoderDecoder
from zoo.models.hf.errors import ConfigError, shorten_repr, suggest_nearest
from zoo.models.hf.families import ALIASES, FAMILIES, get_family
from zoo.models.hf.not_read import find_nearest, find_reason
from zoo.models.hf.predictors import NUM_PREDICTORS, count_predictors
from zoo.models.hf.score_head import choose_head
from zoo.models.hf.shapes import build_shapes
from zoo.models.hf.spec import Config, Family, NameMap, Origin
from zoo.models.hf.towers import TOWERS
from zoo.models.hf.wrappers import TEXT_CONFIG, TIE, WRAPPERS, read_text_config, rename
from zoo.models.parameter_paths import list_parameter_paths

from .directory import CONFIG_NAME
from .generation_config import read_start
from .left_aside import set_aside
from .plan import TensorPlan, drop_tensors, find_mapping, invert_name_map, list_callers, list_copies, plan_tensors
from .safetensors import (
    MAX_LISTED,
    CheckpointError,
    LazyTensor,
    find_stray_index,
    open_tensors,
    raise_problems,
    read_json,
)
from .sentence_files import read_sentence_files
from .stages import (
    Stored,
    map_names,
    narrow_integers,
    note_base_prefix,
    note_head_copies,
    note_lacking,
    pack,
    read_quantization,
    rename_older,
    unwrap,
)
from .tokenizer_files import has_tokenizer

_logger = logging.getLogger("zoo")
_MAX_MISSING = 10_000
_LAYER_COUNTS = ("num_hidden_layers", "num_decoder_layers", "decoder_layers")
_MOST_SHARED_LAYERS = 128
"""Most layers of a checkpoint with fewer tensors than layers, which share them."""


LoadedModel = Any
"""A `zoo.models.Decoder`, `SequenceScore`, `Encoder`, `ImageEncoder`, `EncoderDecoder` or `TwoTowers`: the config says
which."""


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
    tied: tuple[str, ...]
    """Tied weights that are stored twice: the names of the head and of the embedding it must equal. Else ()."""
    head_copies: Mapping[str, str]
    """Tensors of predictors that repeat the embedding or the head -> the tensors that they must equal."""
    copies: Mapping[str, str]
    """Tensors that repeat a shared module under the name of a later caller -> the tensors that they must equal."""


def open_checkpoint(
    path: Path,
    family: Family | None = None,
    ignore: Collection[str] = (),
    packed: bool = False,
    images: bool = True,
) -> Checkpoint:
    """Resolve a checkpoint directory from its config and safetensors headers. Packed matrices stay packed if `packed`,
    and are decoded otherwise. Without `images`, a model that reads images is its language model.

    **Raises** `CheckpointError` as `load` does, except for what only the tensors' data can show.
    """
    config = read_json(path / CONFIG_NAME)
    if family is None:
        family = find_family(config, path / CONFIG_NAME, images=images)
    location = f"{path / CONFIG_NAME}: "
    tensors = open_tensors(path)
    stray = find_stray_index(path)
    try:
        found = resolve_checkpoint(config, tensors, family, ignore, location, str(path), packed)
    except CheckpointError as error:
        hint = f"\n  {stray}" if stray else ""
        if TEXT_CONFIG in family.defaults and _reads_text(path, ignore, packed):
            hint = f". images=False reads its language model{hint}"
        if not hint:
            raise
        raise CheckpointError(f"{error}{hint}") from None
    if stray:
        _logger.warning("%s", stray)
    origin = dataclasses.replace(
        found.model.origin, sentence_files=read_sentence_files(path), has_tokenizer=has_tokenizer(path)
    )
    model = dataclasses.replace(found.model, origin=origin)
    if isinstance(model, EncoderDecoder):
        model = dataclasses.replace(model, start=read_start(path, found.config, model.start))
    return dataclasses.replace(found, model=model)


def _reads_text(path: Path, ignore: Collection[str], packed: bool) -> bool:
    """Return True for a checkpoint whose language model is read alone."""
    if read_json(path / CONFIG_NAME).get("model_type") not in WRAPPERS:
        return False
    try:
        open_checkpoint(path, None, ignore, packed, images=False)
    except CheckpointError:
        return False
    return True


def find_family(config: Mapping[str, Any], path: Path, *, images: bool = True) -> Family:
    """Return the family that the config's `model_type` names, by its name or an alias. For a multimodal checkpoint that
    is not read whole, or without `images`, return the family of its language model.

    **Raises** `CheckpointError` for an unknown `model_type`, with the reason why it is not read and the nearest family
    that is, or the nearest known name.
    """
    try:
        text = read_text_config(config)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    name = text.get("model_type")
    if isinstance(name, str) and (family := get_family(name)) is not None:
        whole = config.get("model_type")
        if images and whole in WRAPPERS:
            return get_family(str(whole)) or family
        return family
    problem = "has no model_type" if name is None else f"has the model_type {shorten_repr(name)}"
    hint = suggest_nearest(name, [*FAMILIES, *ALIASES, *WRAPPERS]) if isinstance(name, str) else ""
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
    try:
        kept = _drop_keys(config_json, ignore)
        unwrapped = unwrap(Stored(kept, tensors, Origin(choose_head(family.choose(kept, tensors), kept), "")))
        described, config, decode = read_quantization(unwrapped, packed)
        config = count_predictors(config, tensors, described.family, described.notes.wrapping)
        _check_layer_count(config, len(tensors))
        plain = build_shapes(described.family, config)
        whole_map = map_names(config, described.notes)
    except ValueError as error:  # an invalid key, or sizes that do not fit together
        raise CheckpointError(f"{config_location}{error}") from None
    own = set_aside(described, config)
    renamed = narrow_integers(rename_older(own, location))
    decoded = renamed if decode is None else renamed.replace(tensors=decode(renamed.tensors, location))
    prefixed = note_base_prefix(decoded, whole_map)
    name_map = map_names(config, prefixed.notes)
    held, shapes = pack(prefixed, plain, name_map, location)
    _check_tensor_count(shapes, name_map, len(held.tensors), location)
    planned = plan_tensors(shapes, name_map)
    stored, head_copies = note_head_copies(note_lacking(held, planned), config)
    tensor_plans = drop_tensors(planned, stored.notes.lacking)
    tied = _find_tied_head(stored, config)
    listed = list_copies(tensor_plans, list_callers(config, stored.notes))
    copies = {copy: name for copy, name in listed.items() if copy in stored.tensors}
    _check_tensors(tensor_plans, stored, location, [*copies, *tied[:1], *head_copies])
    count = config.get(NUM_PREDICTORS, 0)
    origin = dataclasses.replace(stored.notes, config=json.dumps(stored.config), predictors=count)
    model = dataclasses.replace(shapes, origin=origin)
    tensors = stored.tensors
    return Checkpoint(
        location, stored.family, config, model, name_map, tensor_plans, tensors, tied, head_copies, copies
    )


def _drop_keys(config: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    """Return a config without some keys, also in the configs of a language model and of towers."""
    kept = {key: value for key, value in config.items() if key not in ignore}
    for name in TOWERS:
        if isinstance(part := kept.get(name), Mapping):
            kept[name] = {key: value for key, value in part.items() if key not in ignore}
    return kept


def _check_layer_count(config: Config, available: int) -> None:
    """**Raises** `ConfigError` for far more layers than tensors: building 10^9 layers, if only in shapes, would never
    end."""
    for table in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for key in _LAYER_COUNTS:
            layers = table.get(key)
            if isinstance(layers, int) and layers > max(available, _MOST_SHARED_LAYERS):
                raise ConfigError(f"{key} = {layers}, and the checkpoint has {available} tensors in all")


def _find_tied_head(stored: Stored, config: Config) -> tuple[str, ...]:
    """Return the names of a tied head that is stored all the same, and of the embedding that it must equal; else ()."""
    family = stored.family
    names = tuple(rename(f"{module}.weight", stored.notes.wrapping) for module in (family.head, family.embedding))
    is_tied = config.get(TIE, family.required_values.get(TIE) == (True,))
    return names if is_tied and stored.tensors.keys() >= {*names} else ()


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
    tensor_plans: Mapping[str, TensorPlan], stored: Stored, location: str, allowed: Collection[str]
) -> None:
    """**Raises** `CheckpointError` that lists every tensor that is missing, unexpected, or of another shape."""
    tensors = stored.tensors
    problems = []
    unexpected = tensors.keys() - tensor_plans.keys() - set(allowed)
    for number, name in enumerate(sorted(tensor_plans.keys() - tensors.keys())):
        hint = suggest_nearest(name, unexpected) if number < MAX_LISTED else ""
        problems.append(f"{name} {list(tensor_plans[name].shape)} is missing{hint}")
    for name in unexpected:
        if not any(re.search(pattern, name) for pattern in stored.family.ignored_tensors):
            problems.append(f"{name} {list(tensors[name].shape)} has no place in the model")
    for name in tensor_plans.keys() & tensors.keys():
        if tensors[name].shape != tensor_plans[name].shape:
            found = list(tensors[name].shape)
            expected = list(tensor_plans[name].shape)
            problems.append(f"{name} is {found} in the file, and the config asks for {expected}")
    raise_problems(f"{location} does not hold the {stored.family.name} that its config describes:", problems)
