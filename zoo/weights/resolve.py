"""A checkpoint, understood and not yet read: which model it is of, and which of its tensors belongs where."""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from zoo.models import Decoder
from zoo.models.hf.config import ConfigError, read_config, suggest_nearest
from zoo.models.hf.spec import Config, Family, NameMap, Origin

from .directory import CONFIG_NAME, find_family, open_tensors, read_json, resolve_directory
from .packed import unpack_mxfp4
from .plan import TensorPlan, plan, strip_base_prefix_if_absent
from .safetensors import CheckpointError, LazyTensor

_QUANTIZATION_KEY = "quantization_config"
"""The key of a config that says that matrices are packed."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What is known of a checkpoint before a tensor of it is read. Names and shapes agree with the config's."""

    location: str
    """What errors call it."""
    family: Family
    config: Config
    model: Decoder
    """In shapes only."""
    name_map: NameMap
    tensor_plans: Mapping[str, TensorPlan]
    """The tensors that the model is made of."""
    tensors: Mapping[str, LazyTensor]
    """All that there are."""
    tied: tuple[str, str] | None
    """A head that is stored though the config ties it, and the embedding that it has to be equal to."""


def open_checkpoint(
    directory: str | Path, family: Family | None = None, ignore: Collection[str] = (), packed: bool = False
) -> Checkpoint:
    """A directory, understood. Only its config and headers are read. Packed matrices stay so if `packed`, and are else
    read as if they were not.

    **Raises** `CheckpointError` as `load` does, numbers apart.
    """
    path = resolve_directory(directory)
    given = read_json(path / CONFIG_NAME)
    family = find_family(given, path / CONFIG_NAME) if family is None else family
    return resolve_checkpoint(given, open_tensors(path), family, ignore, f"{path / CONFIG_NAME}: ", str(path), packed)


def resolve_checkpoint(
    given: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    family: Family,
    ignore: Collection[str],
    config_location: str,
    location: str,
    packed: bool = False,
) -> Checkpoint:
    """A config and tensors, held against each other."""
    given, decode = {key: value for key, value in given.items() if key not in ignore}, False
    try:
        config = read_config(family, given)
        if config.get(_QUANTIZATION_KEY) is None and packed:
            raise ConfigError(
                f"packed=True, and without a {_QUANTIZATION_KEY} nothing in the checkpoint is packed: leave it out"
            )
        if config.get(_QUANTIZATION_KEY) is not None and not packed:
            given = {key: value for key, value in given.items() if key != _QUANTIZATION_KEY}
            config, decode = read_config(family, given), True
        layers = config["num_hidden_layers"]
        if layers > len(tensors):  # so many would take forever to describe
            raise ConfigError(f"num_hidden_layers = {layers}, and the checkpoint has {len(tensors)} tensors in all")
        model = eqx.filter_eval_shape(lambda: family.build(config, key=jax.random.key(0)))
        table = family.names(config)
    except ValueError as error:  # keys by themselves, or sizes that do not go together
        raise CheckpointError(f"{config_location}{error}") from None
    tensors = unpack_mxfp4(tensors, location) if decode else tensors
    short = strip_base_prefix_if_absent(table, set(tensors))
    model = dataclasses.replace(model, origin=Origin(family, json.dumps(given), short is not None))
    table = table if short is None else short
    planned = plan(model, table)
    head, embedding = f"{family.head}.weight", f"{family.embedding}.weight"
    tied = config.get("tie_word_embeddings") and {head, embedding} <= tensors.keys()
    unread = () if family.find_ignored_tensors is None else family.find_ignored_tensors(config, tensors)
    _check_tensors(planned, tensors, family, location, allowed=(head, *unread) if tied else unread)
    return Checkpoint(location, family, config, model, table, planned, tensors, (head, embedding) if tied else None)


_MAX_LISTED = 20


def _check_tensors(
    tensor_plans: Mapping[str, TensorPlan],
    tensors: Mapping[str, LazyTensor],
    family: Family,
    location: str,
    allowed: Collection[str],
) -> None:
    """**Raises** `CheckpointError` that tells of every tensor that is missing, too many, or of another shape."""
    wrong, surplus = [], tensors.keys() - tensor_plans.keys() - set(allowed)
    for number, name in enumerate(sorted(tensor_plans.keys() - tensors.keys())):
        hint = suggest_nearest(name, surplus) if number < _MAX_LISTED else ""
        wrong.append(f"{name} {list(tensor_plans[name].shape)} is missing{hint}")
    for name in surplus:
        if not any(re.search(pattern, name) for pattern in family.ignored_tensors):
            wrong.append(f"{name} {list(tensors[name].shape)} has no place in the model")
    for name in tensor_plans.keys() & tensors.keys():
        if tensors[name].shape != tensor_plans[name].shape:
            theirs, ours = list(tensors[name].shape), list(tensor_plans[name].shape)
            wrong.append(f"{name} is {theirs} in the file, and the config asks for {ours}")
    if wrong:
        listed = "\n  ".join(sorted(wrong)[:_MAX_LISTED])
        more = f"\n  and {len(wrong) - _MAX_LISTED} more" if len(wrong) > _MAX_LISTED else ""
        raise CheckpointError(
            f"{location} does not hold the {family.name} that its config describes:\n  {listed}{more}"
        )
