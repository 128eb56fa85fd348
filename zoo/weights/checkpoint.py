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
from zoo.models.config import ConfigError, nearest, read_config
from zoo.models.facts import Config, Family, Origin, Table

from .directory import CONFIG, family_of, find, read_json, tensors_of
from .packed import unpacked
from .plan import Planned, bare, plan
from .tensors import CheckpointError, Tensor

PACKED = "quantization_config"
"""The key of a config that says that matrices are packed."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What is known of a checkpoint before a tensor of it is read. Names and shapes agree with the config's."""

    place: str
    """What errors call it."""
    family: Family
    config: Config
    model: Decoder
    """In shapes only."""
    table: Table
    planned: Mapping[str, Planned]
    """The tensors that the model is made of."""
    tensors: Mapping[str, Tensor]
    """All that there are."""
    tied: tuple[str, str] | None
    """A head that is stored though the config ties it, and the embedding that it has to be equal to."""


def opened(
    directory: str | Path, family: Family | None = None, ignore: Collection[str] = (), packed: bool = False
) -> Checkpoint:
    """A directory, understood. Only its config and headers are read. Packed matrices stay so if `packed`, and are else
    read as if they were not.

    **Raises** `CheckpointError` as `load` does, numbers apart.
    """
    path = find(directory)
    given = read_json(path / CONFIG)
    family = family_of(given, path / CONFIG) if family is None else family
    return understood(given, tensors_of(path), family, ignore, f"{path / CONFIG}: ", str(path), packed)


def understood(
    given: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    family: Family,
    ignore: Collection[str],
    config_place: str,
    place: str,
    packed: bool = False,
) -> Checkpoint:
    """A config and tensors, held against each other."""
    given, decode = {key: value for key, value in given.items() if key not in ignore}, False
    try:
        config = read_config(family, given)
        if config.get(PACKED) is None and packed:
            raise ConfigError(f"packed=True, and without a {PACKED} nothing in the checkpoint is packed: leave it out")
        if config.get(PACKED) is not None and not packed:
            given = {key: value for key, value in given.items() if key != PACKED}
            config, decode = read_config(family, given), True
        layers = config["num_hidden_layers"]
        if layers > len(tensors):  # so many would take forever to describe
            raise ConfigError(f"num_hidden_layers = {layers}, and the checkpoint has {len(tensors)} tensors in all")
        model = eqx.filter_eval_shape(lambda: family.build(config, key=jax.random.key(0)))
        table = family.names(config)
    except ValueError as error:  # keys by themselves, or sizes that do not go together
        raise CheckpointError(f"{config_place}{error}") from None
    tensors = unpacked(tensors, place) if decode else tensors
    short = bare(table, set(tensors))
    model = dataclasses.replace(model, origin=Origin(family, json.dumps(given), short is not None))
    table = table if short is None else short
    planned = plan(model, table)
    head, embedding = f"{family.head}.weight", f"{family.embedding}.weight"
    tied = config.get("tie_word_embeddings") and {head, embedding} <= tensors.keys()
    unread = () if family.unread is None else family.unread(config, tensors)
    hold_against(planned, tensors, family, place, allowed=(head, *unread) if tied else unread)
    return Checkpoint(place, family, config, model, table, planned, tensors, (head, embedding) if tied else None)


TOLD = 20


def hold_against(
    planned: Mapping[str, Planned],
    tensors: Mapping[str, Tensor],
    family: Family,
    place: str,
    allowed: Collection[str],
) -> None:
    """**Raises** `CheckpointError` that tells of every tensor that is missing, too many, or of another shape."""
    wrong, surplus = [], tensors.keys() - planned.keys() - set(allowed)
    for number, name in enumerate(sorted(planned.keys() - tensors.keys())):
        hint = nearest(name, surplus) if number < TOLD else ""
        wrong.append(f"{name} {list(planned[name].shape)} is missing{hint}")
    for name in surplus:
        if not any(re.search(pattern, name) for pattern in family.ignored):
            wrong.append(f"{name} {list(tensors[name].shape)} has no place in the model")
    for name in planned.keys() & tensors.keys():
        if tensors[name].shape != planned[name].shape:
            theirs, ours = list(tensors[name].shape), list(planned[name].shape)
            wrong.append(f"{name} is {theirs} in the file, and the config asks for {ours}")
    if wrong:
        listed = "\n  ".join(sorted(wrong)[:TOLD])
        more = f"\n  and {len(wrong) - TOLD} more" if len(wrong) > TOLD else ""
        raise CheckpointError(f"{place} does not hold the {family.name} that its config describes:\n  {listed}{more}")
