"""Tensors of a checkpoint that the language model does not use: towers of other modalities, projectors, modules of
multi-token prediction. They are set aside on loading, and written back from the checkpoint on saving."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from zoo.models.hf.config import read_config
from zoo.models.hf.errors import ConfigError
from zoo.models.hf.predictors import list_prefixes, set_predictors
from zoo.models.hf.spec import Config, Family, Origin, Wrapping
from zoo.models.hf.wrappers import is_text_tensor

from .directory import CONFIG_NAME
from .formats import QUANTIZATION_KEY, split_quantization
from .formats.lazy import dequantize_lazily
from .safetensors import CheckpointError, LazyTensor, open_tensors, read_json
from .stages import Stored, unwrap

_MAX_LISTED = 6
_LAYER = re.compile(r"(?:model\.)?layers\.\d+(?=\.)")


def set_aside(stored: Stored, config: Config) -> Stored:
    """Set the tensors aside that the language model does not use, and note them in words. `write_back` undoes it."""
    kept, aside = _split(stored.tensors, stored.family, config, stored.notes.wrapping)
    return stored.replace(tensors=kept, left_aside=_list_modules(aside))


def _split(
    tensors: Mapping[str, LazyTensor], family: Family, config: Config, wrapping: Wrapping | None
) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """Return the tensors of the language model, and all others."""
    predictors = list_prefixes(family, config, wrapping)
    text = [name for name in tensors if is_text_tensor(name, family, wrapping) or name.startswith(predictors)]
    aside = {name for name in text if any(re.search(pattern, name) for pattern in family.other_modules)}
    if family.find_ignored_tensors is not None:
        aside |= set(family.find_ignored_tensors(config, text))
    aside = {name for name in aside if not name.startswith(predictors)}
    kept = {name: tensors[name] for name in text if name not in aside}
    return kept, {name: tensor for name, tensor in tensors.items() if name not in kept}


def _list_modules(tensors: Mapping[str, LazyTensor]) -> str:
    """Return the number of tensors, their bytes, and the beginnings of their names; "" for none."""
    if not tensors:
        return ""
    size = sum(tensor.nbytes for tensor in tensors.values())
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
class Source:
    """The directory that a model was loaded from, to save it with all that the directory holds."""

    path: Path
    wrapping: Wrapping | None
    body: Mapping[str, LazyTensor]
    """The language model's own tensors, decoded if the model was."""
    aside: Mapping[str, LazyTensor]
    """All others."""
    mtp: Mapping[str, LazyTensor]
    """Those set aside that are modules of multi-token prediction, which are trained with the body."""
    changed: list[str] = dataclasses.field(default_factory=list)
    """The first tensor of the model that was written and differs from the body's, if there is `mtp`."""


def open_source(path: Path, origin: Origin) -> Source:
    """Open the directory that a model of this origin was loaded from. Reads headers only.

    Tensors are written back as they are stored, but quantized ones are decoded if the model was: its config no longer
    says how to read them.

    **Raises** `CheckpointError` for a directory of another family, wrapped otherwise, or quantized otherwise.
    """
    family = origin.family
    given = Stored(read_json(path / CONFIG_NAME), open_tensors(path), origin)
    written = json.loads(origin.config)
    try:
        unwrapped = unwrap(given)
        plain, quantized = split_quantization(unwrapped.config)
        known = read_config(family, plain, ignore=plain.keys() - written.keys() - family.defaults.keys())
    except ConfigError as error:
        raise CheckpointError(f"source: {path / CONFIG_NAME} is not a config of a {family.name}: {error}") from None
    known = set_predictors(known, origin.predictors)
    wrapping = unwrapped.notes.wrapping
    if (wrapping is None) != (origin.wrapping is None):
        is_what = "holds only a language model" if wrapping is None else "is multimodal"
        raise CheckpointError(f"source: {path} {is_what}, and the model's checkpoint is the other way round")
    of_file = unwrapped.config.get(QUANTIZATION_KEY)
    of_model = written.get(QUANTIZATION_KEY)
    is_quantized_here = of_file is None and not origin.packed and split_quantization(written)[1] is not None
    if of_model is not None and of_file != of_model and not is_quantized_here:
        raise CheckpointError(f"source: {path} has the {QUANTIZATION_KEY} {of_file!r}, and the model {of_model!r}")
    body, aside = _split(given.tensors, family, known, wrapping)
    if quantized is not None and of_model is None:
        body, aside = (dequantize_lazily(quantized, tensors, f"source: {path}") for tensors in (body, aside))
    layers = known.get("num_hidden_layers")
    mtp = {name: x for name, x in aside.items() if is_text_tensor(name, family, wrapping) and _is_mtp(name, layers)}
    return Source(path, wrapping, body, aside, mtp)


def _is_mtp(name: str, layers: int | None) -> bool:
    """Return True for a tensor of multi-token prediction, which is named so or in a layer after the last."""
    if re.search(r"(^|\.)mtp[._]", name):
        return True
    layer = re.search(r"layers\.(\d+)\.", name)
    return layers is not None and layer is not None and int(layer[1]) >= layers


def write_back(stored: Stored, source: Source) -> Stored:
    """Undo `set_aside` with the tensors of `source`, whose names the tensors have.

    **Raises** `CheckpointError` if `source` belongs to another model: if the model itself writes one of the tensors
    set aside, or shares no tensor with the source, or one of another shape.
    """
    own = dict(stored.tensors)
    if taken := sorted(own.keys() & source.aside.keys()):
        raise CheckpointError(f"source: {source.path} has {taken[0]} beside its model, and this model has it itself")
    shared = sorted(own.keys() & source.body.keys())
    for name in shared:
        there = source.body[name].shape
        here = own[name].shape
        if there != here:
            raise CheckpointError(
                f"source: {source.path} has another model: {name} is {list(there)} there, and {list(here)} here"
            )
    if not shared:
        raise CheckpointError(f"source: {source.path} has another model: it has no tensor named {next(iter(own))}")
    if source.mtp:
        own |= {name: _watch_changes(name, own[name], source) for name in shared}
    return stored.replace(tensors=dict(sorted({**own, **source.aside}.items())))


def _watch_changes(name: str, tensor: LazyTensor, source: Source) -> LazyTensor:
    """Return a tensor that is compared with the source's when it is read, in the narrower of their dtypes."""
    stored = source.body[name]
    dtype = min(stored.dtype, tensor.dtype, key=lambda dtype: dtype.itemsize)

    def read() -> np.ndarray:
        array = tensor.read()
        if not source.changed:
            old, new = (x.astype(dtype).reshape(-1).view(np.uint8) for x in (stored.read(), array))
            if not np.array_equal(old, new):
                source.changed.append(name)
            stored.release()
        return array

    return dataclasses.replace(tensor, read=read)


def describe_stale(source: Source) -> str:
    """Return a warning for modules of multi-token prediction that were saved with another body than theirs; "" if the
    body is the same."""
    if not source.changed:
        return ""
    return (
        f"the model is not the one in {source.path} any more, {source.changed[0]} differs, and its modules of "
        f"multi-token prediction are written as they were there: {_list_modules(source.mtp)}. They predict what the "
        "old model would: do not draft with them, or train them again"
    )
