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
    body: Mapping[str, LazyTensor] = dataclasses.field(default_factory=dict)
    """The language model's own tensors in the source, decoded if the model was."""
    mtp: tuple[str, ...] = ()
    """Those of `tensors` that are modules of multi-token prediction, which are trained with the body."""

    @property
    def specs(self) -> _TensorSpecs:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}

    def or_else(
        self, assemble: Callable[[str], np.ndarray], changed: list[str] | None = None
    ) -> Callable[[str], np.ndarray]:
        """Return a function that reads a tensor that was left aside, and assembles any other. Pages of the file are
        dropped when the next tensor is read, so that one tensor is in memory at a time.

        - `changed`: gets the name of the first assembled tensor that differs from the source's.
        """
        before: list[LazyTensor] = []

        def read(name: str) -> np.ndarray:
            while before:
                before.pop().release()
            if name not in self.tensors:
                array = assemble(name)
                if changed is not None and not changed and not self._equals_source(name, array):
                    changed.append(name)
                return array
            before.append(self.tensors[name])
            return self.tensors[name].read()

        return read

    def _equals_source(self, name: str, array: np.ndarray) -> bool:
        """Compare a tensor with the source's, in the narrower of their dtypes. A name that the source lacks is equal:
        it was named, or tied, otherwise there."""
        if name not in self.body:
            return True
        stored = self.body[name]
        dtype = min(stored.dtype, array.dtype, key=lambda dtype: dtype.itemsize)
        old, new = (np.ascontiguousarray(x.astype(dtype)).reshape(-1).view(np.uint8) for x in (stored.read(), array))
        stored.release()
        return np.array_equal(old, new)

    def describe_stale(self, source: str | Path, changed: str) -> str:
        """Return a warning for modules of multi-token prediction that are saved with another body than theirs."""
        mtp = describe_left_aside({name: self.tensors[name] for name in self.mtp})
        return (
            f"the model is not the one in {source} any more, {changed} differs, and its modules of multi-token "
            f"prediction are written as they were there: {mtp}. They predict what the old model would: do not draft "
            "with them, or train them again"
        )


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
    body, aside = split_left_aside(tensors, family, known, wrapping)
    if quantized is not None and written.get(QUANTIZATION_KEY) is None:
        body, aside = (dequantize_lazily(x, quantized, f"source: {path}") for x in (body, aside))
    layers = known.get("num_hidden_layers")
    mtp = (name for name in aside if is_text_tensor(name, family, wrapping) and _is_mtp(name, layers))
    return LeftAside(aside, wrapping, body, tuple(mtp))


def _is_mtp(name: str, layers: int | None) -> bool:
    """Return True for a tensor of multi-token prediction, which is named so or in a layer after the last."""
    if re.search(r"(^|\.)mtp[._]", name):
        return True
    layer = re.search(r"layers\.(\d+)\.", name)
    return layers is not None and layer is not None and int(layer[1]) >= layers


def check_source(source: str | Path, specs: _TensorSpecs, aside: LeftAside) -> None:
    """**Raises** `CheckpointError` if `source` belongs to another model: if the model itself writes one of the tensors
    left aside, or shares no tensor with the source, or one of another shape."""
    stored = aside.body
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
