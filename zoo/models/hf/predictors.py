"""Modules of multi-token prediction in a family's checkpoints: how many a file has, how they are built and named.

Their number follows from the tensors and not from the config, which often states one that the file lacks. A config that
was read has it under `NUM_PREDICTORS`.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import Linear
from zoo.parallel import Dim

from ..decoder import Decoder
from ..predictors import Predictor, make_predictor
from ..stack import Stack
from .spec import Config, Family, NameMap, TensorMapping, Wrapping, prefixed
from .wrappers import TIE, rename

NUM_PREDICTORS = "num_predictors"
_LAYERS = "layers.*."
_SHARED = ("embedding", "head")
"""Modules of the model that files may repeat in a predictor."""


def build_model(family: Family, config: Config, *, key: Key[Array, ""]) -> Any:
    """Build the model of a config, with as many predictors as it says."""
    model = family.build(config, key=key)
    count = config.get(NUM_PREDICTORS, 0)
    if not count or family.predictors is None:
        return model
    predictors = tuple(_build_predictor(family, config, key) for _ in range(count))
    return dataclasses.replace(model, predictors=predictors)


def _build_predictor(family: Family, config: Config, key: Key[Array, ""]) -> Predictor:
    """Build a predictor with the layers and the norm of a smaller model of the family."""
    assert family.predictors is not None
    decoder: Decoder = family.build(_make_layer_config(family, config), key=key)
    embed = config["hidden_size"]
    projection = Linear(2 * embed, embed, in_=Dim("latent"), out=Dim("embed"), key=key)
    assert isinstance(decoder.stack, Stack)
    layers = tuple(decoder.stack.iter_blocks())
    return make_predictor(decoder.norm, projection, layers, state_first=family.predictors.state_first)


def _make_layer_config(family: Family, config: Config) -> Config:
    """Return the config of a model that has only the layers of one predictor."""
    assert family.predictors is not None
    return Config(config, **family.predictors.layers(config))


def count_predictors(config: Config, tensors: Collection[str], family: Family, wrapping: Wrapping | None) -> Config:
    """Return the config with the number of predictors that the tensors have: those with all of their modules."""
    if family.predictors is None:
        return config
    count = 0
    while _has_modules(tensors, _list_prefixes(family, config, count, wrapping)):
        count += 1
    return set_predictors(config, count)


def _has_modules(tensors: Collection[str], prefixes: list[str]) -> bool:
    """Return True if some tensor has each beginning of a name."""
    return all(any(name.startswith(prefix) for name in tensors) for prefix in prefixes)


def _list_prefixes(family: Family, config: Config, number: int, wrapping: Wrapping | None) -> list[str]:
    """Return the beginnings of the names of a predictor's tensors."""
    return [f"{rename(name, wrapping)}." for name in _list_modules(family, config, number)]


def _list_modules(family: Family, config: Config, number: int) -> dict[str, str]:
    """Return the names of a predictor's own modules in files -> their names in it."""
    assert family.predictors is not None
    names = family.predictors.names(config, number)
    return {theirs: ours for theirs, ours in names.items() if ours not in _SHARED}


def set_predictors(config: Config, count: int) -> Config:
    """Return the config with this number of predictors."""
    return Config(config, **{NUM_PREDICTORS: count}) if count else config


def name_tensors(family: Family, config: Config) -> NameMap:
    """Return the name map of a family's checkpoint, with its predictors."""
    names = family.names(config)
    count = config.get(NUM_PREDICTORS, 0)
    if not count:
        return names
    layer_names = prefixed("", "", family.names(_make_layer_config(family, config)))
    layer_names = {name: mapping for name, mapping in layer_names.items() if mapping.parts[0].startswith(_LAYERS)}
    named = dict(names)
    for number in range(count):
        for theirs, ours in _list_modules(family, config, number).items():
            if ours.startswith("layers."):
                for name, mapping in layer_names.items():
                    rest = name.partition(".*.")[2]
                    named[f"{theirs}.{rest}"] = _move(mapping, f"predictors.{number}.{ours}.")
            else:
                named[theirs] = f"predictors.{number}.{ours}"
    return named


def _move(mapping: TensorMapping, ours: str) -> TensorMapping:
    """Return the mapping of a layer's tensor for a layer that is not numbered by a star."""
    otherwise = None if mapping.otherwise is None else _move(mapping.otherwise, ours)
    parts = tuple(ours + part.removeprefix(_LAYERS) for part in mapping.parts)
    return dataclasses.replace(mapping, parts=parts, otherwise=otherwise)


def list_prefixes(family: Family, config: Config, wrapping: Wrapping | None) -> tuple[str, ...]:
    """Return the beginnings of the names of the predictors' tensors; () without predictors."""
    count = config.get(NUM_PREDICTORS, 0)
    return tuple(prefix for number in range(count) for prefix in _list_prefixes(family, config, number, wrapping))


def list_head_copies(family: Family, config: Config, wrapping: Wrapping | None) -> dict[str, str]:
    """Return the names of tensors in predictors that repeat the embedding or the head -> the names of these."""
    if family.predictors is None:
        return {}
    head = family.embedding if config.get(TIE) else family.head
    sources = {"embedding": family.embedding, "head": head}
    return {
        rename(f"{theirs}.weight", wrapping): rename(f"{sources[ours]}.weight", wrapping)
        for number in range(config.get(NUM_PREDICTORS, 0))
        for theirs, ours in family.predictors.names(config, number).items()
        if ours in sources
    }


def write_count(config: Mapping[str, Any], family: Family, count: int) -> dict[str, Any]:
    """Return a config.json with the number of predictors, under the key that the family has for it."""
    if family.predictors is None or family.predictors.count_key is None:
        return dict(config)
    return {**config, family.predictors.count_key: count}
