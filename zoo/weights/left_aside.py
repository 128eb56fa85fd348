"""Tensors of a checkpoint that the language model does not use: towers of other modalities, projectors, modules of
multi-token prediction. They are left aside on loading, and written back from the checkpoint on saving."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from zoo.models.hf.config import read_config
from zoo.models.hf.errors import ConfigError
from zoo.models.hf.spec import Config, Family, Origin, Wrapping
from zoo.models.hf.wrappers import is_text_tensor, unwrap_config

from .directory import CONFIG_NAME, resolve_directory
from .formats import QUANTIZATION_KEY, split_quantization
from .formats.lazy import dequantize_lazily
from .safetensors import CheckpointError, LazyTensor, open_tensors, read_json

_MAX_LISTED = 6
_LAYER = re.compile(r"(?:model\.)?layers\.\d+(?=\.)")
_TensorSpecs = dict[str, tuple[tuple[int, ...], np.dtype]]


def split_left_aside(
    tensors: Mapping[str, LazyTensor], family: Family, config: Config, wrapping: Wrapping | None
) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """Return the tensors of the language model, and the tensors that are left aside."""
    text = [name for name in tensors if is_text_tensor(name, family, wrapping)]
    aside = {name for name in text if any(re.search(pattern, name) for pattern in family.other_modules)}
    if family.find_ignored_tensors is not None:
        aside |= set(family.find_ignored_tensors(config, text))
    kept = {name: tensors[name] for name in text if name not in aside}
    return kept, {name: tensor for name, tensor in tensors.items() if name not in kept}


def describe_left_aside(tensors: Mapping[str, LazyTensor]) -> str:
    """Return the number of tensors, their bytes, and the beginnings of their names; "" for none."""
    if not tensors:
        return ""
    size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    prefixes = list(dict.fromkeys(_find_prefix(name) for name in sorted(tensors)))
    more = f" and {len(prefixes) - _MAX_LISTED} more" if len(prefixes) > _MAX_LISTED else ""
    count = "1 tensor" if len(tensors) == 1 else f"{len(tensors):,} tensors"
    return f"{count} ({size:,} bytes), {', '.join(prefixes[:_MAX_LISTED])}{more}"


def _find_prefix(name: str) -> str:
    """Return the module that a tensor is listed under: a layer of the language model, or one of the outermost."""
    if match := _LAYER.match(name):
        return f"{match[0]}.*"
    first, _, rest = name.partition(".")
    if first not in ("model", "language_model"):
        return f"{first}.*" if rest else first
    second, _, rest = rest.partition(".")
    if not rest:
        return name
    return f"{first}.{second}.*"


@dataclasses.dataclass(frozen=True)
class LeftAside:
    """Tensors to write next to the saved model's."""

    tensors: Mapping[str, LazyTensor]
    wrapping: Wrapping | None

    @property
    def specs(self) -> _TensorSpecs:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}

    def or_else(self, assemble: Callable[[str], np.ndarray]) -> Callable[[str], np.ndarray]:
        """Return a function that reads a tensor that was left aside, and assembles any other. Pages of the file are
        dropped when the next tensor is read, so that one tensor is in memory at a time."""
        before: list[LazyTensor] = []

        def read(name: str) -> np.ndarray:
            while before:
                before.pop().release()
            if name not in self.tensors:
                return assemble(name)
            before.append(self.tensors[name])
            return self.tensors[name].read()

        return read


def open_left_aside(source: str | Path, origin: Origin) -> LeftAside:
    """Find the tensors in the directory `source` that loading a model of this origin left aside. Reads headers only.

    The tensors are written as they are stored, but quantized ones are decoded if the model was: its config no longer
    says how to read them.

    **Raises** `CheckpointError` for a directory of another family, wrapped otherwise, or quantized otherwise.
    """
    path = resolve_directory(source)
    config_json = read_json(path / CONFIG_NAME)
    tensors = open_tensors(path)
    family = origin.family
    written = json.loads(origin.config)
    try:
        text, wrapping = unwrap_config(config_json, family, tensors)
        plain, quantized = split_quantization(text)
        known = read_config(family, plain, ignore=plain.keys() - written.keys() - family.defaults.keys())
    except ConfigError as error:
        raise CheckpointError(f"source: {path / CONFIG_NAME} is not a config of a {family.name}: {error}") from None
    if (wrapping is None) != (origin.wrapping is None):
        if wrapping is None:
            is_what = "holds only a language model"
        else:
            is_what = "is multimodal"
        raise CheckpointError(f"source: {path} {is_what}, and the model's checkpoint is the other way round")
    if (of_file := text.get(QUANTIZATION_KEY)) != (of_model := written.get(QUANTIZATION_KEY)) and of_model is not None:
        raise CheckpointError(f"source: {path} has the {QUANTIZATION_KEY} {of_file!r}, and the model {of_model!r}")
    _, aside = split_left_aside(tensors, family, known, wrapping)
    if quantized is not None and written.get(QUANTIZATION_KEY) is None:
        aside = dequantize_lazily(aside, quantized, f"source: {path}")
    return LeftAside(aside, wrapping)


def check_source(source: str | Path, specs: _TensorSpecs, aside: LeftAside) -> None:
    """**Raises** `CheckpointError` if `source` belongs to another model: if the model itself writes one of the tensors
    left aside, or shares no tensor with the source, or one of another shape."""
    stored = open_tensors(resolve_directory(source))
    if taken := sorted(specs.keys() & aside.tensors.keys()):
        raise CheckpointError(f"source: {source} has {taken[0]} beside its model, and this model has it itself")
    for name in sorted(specs.keys() & stored.keys()):
        if stored[name].shape != specs[name][0]:
            raise CheckpointError(
                f"source: {source} has another model: {name} is {list(stored[name].shape)} there, and "
                f"{list(specs[name][0])} here"
            )
    if not specs.keys() & stored.keys():
        raise CheckpointError(f"source: {source} has another model: it has no tensor named {next(iter(specs))}")
