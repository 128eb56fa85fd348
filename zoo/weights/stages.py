"""The way of a checkpoint directory into a model, in stages, and the way back.

A stage takes one difference between a directory and the family's own layout away and notes it. Its undo makes the
difference again, as the notes say:

| in, from above | the difference | out, from below |
|---|---|---|
| `unwrap` | a multimodal config around the language model's | `wrap` |
| `read_quantization` | quantized matrices: whether they are decoded, and the config without them | |
| `set_aside` | tensors of other modules | `write_back`, from `source=` |
| `rename_older` | endings of names in older files | `restore_older` |
| `narrow_integers` | int64 in place of int32 | `widen_integers` |
| `read_quantization`'s `decode` | plain tensors in place of quantized ones | |
| `note_base_prefix` | names without `model.` | by `map_names` |
| `pack` | quantized matrices that packed layers hold, once the model is built in shapes | `unpack` |
| `note_lacking` | optional tensors, once all are planned | `drop_lacking` |
| `note_head_copies` | embedding and head once more, in predictors | `restore_head_copies` |

The config is read before the tensors are looked at, so that its errors come first. Tensors keep the names of the files,
which messages and options such as `modules_to_not_convert` have: `map_names` translates the family's names instead.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from zoo.models.hf.config import read_config
from zoo.models.hf.errors import ConfigError
from zoo.models.hf.predictors import list_head_copies, name_tensors, set_predictors
from zoo.models.hf.spec import Config, Family, NameMap, Origin, replace_ending
from zoo.models.hf.wrappers import rename_all, unwrap_config, wrap_config

from .formats import QUANTIZATION_KEY, split_quantization
from .formats.lazy import dequantize_lazily
from .formats.pack import list_packed, pack_model, unpack_tensors
from .packed import unpack_mxfp4
from .plan import drop_tensors, list_callers
from .safetensors import CheckpointError, LazyTensor

_Model = TypeVar("_Model")
_Decode = Callable[[Mapping[str, LazyTensor], str], Mapping[str, LazyTensor]]
"""`decode(tensors, location)`; `location` is the directory's name in error messages."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A config and tensors on their way from a directory into a model, or back. No tensor has been read yet."""

    config: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    notes: Origin
    """The differences that were taken away, as needed to make them again. `Origin.config` is written at the end."""

    @property
    def family(self) -> Family:
        return self.notes.family

    def replace(self, *, config: Mapping | None = None, tensors: Mapping | None = None, **notes: Any) -> "Stored":
        """Return the record with another config, with other tensors, or with some fields of its notes replaced."""
        return Stored(
            self.config if config is None else config,
            self.tensors if tensors is None else tensors,
            dataclasses.replace(self.notes, **notes),
        )


def unwrap(stored: Stored) -> Stored:
    """Take the language model's config out of a multimodal one. **Raises** `ConfigError` as `unwrap_config` does."""
    config, wrapping = unwrap_config(stored.config, stored.family, stored.tensors)
    return stored.replace(config=config, wrapping=wrapping)


def wrap(stored: Stored) -> Stored:
    """Undo `unwrap`."""
    if stored.notes.wrapping is None:
        return stored
    return stored.replace(config=wrap_config(stored.config, stored.notes.wrapping))


def read_quantization(stored: Stored, packed: bool) -> tuple[Stored, Config, _Decode | None]:
    """Return the record with the config of the model that is built, this config as it is read, and the function that
    decodes the tensors, if they are quantized. What is decoded is a model like any other: there is nothing to undo.

    **Raises** `ConfigError` as `read_config` does, for a format that is not read, and for `packed` of a plain file.
    """
    plain, quantized = split_quantization(stored.config)
    config = read_config(stored.family, plain)
    is_mxfp4 = config.get(QUANTIZATION_KEY) is not None
    if packed and quantized is None and not is_mxfp4:
        raise ConfigError(
            f"packed=True, and without a {QUANTIZATION_KEY} nothing in the checkpoint is packed: leave it out"
        )
    if packed:
        return stored, config, None
    if is_mxfp4:
        dense = {key: value for key, value in plain.items() if key != QUANTIZATION_KEY}
        return stored.replace(config=dense), read_config(stored.family, dense), unpack_mxfp4
    decode = None if quantized is None else partial(dequantize_lazily, quantized)
    return stored.replace(config=plain), config, decode


def rename_older(stored: Stored, location: str) -> Stored:
    """Give tensors the family's endings in place of the endings in older files.

    **Raises** `CheckpointError` for a tensor that is there by both names.
    """
    endings = stored.family.older_endings
    newer = {name: replace_ending(name, endings) for name in stored.tensors}
    older = tuple(name for name in newer if newer[name] != name)
    for name in older:
        if newer[name] in stored.tensors:
            raise CheckpointError(
                f"{location}: {name} and {newer[name]} are one tensor, by two names: leave one of them out"
            )
    return stored.replace(tensors={newer[name]: x for name, x in stored.tensors.items()}, older_names=older)


def restore_older(stored: Stored) -> Stored:
    """Undo `rename_older`."""
    older = {replace_ending(name, stored.family.older_endings): name for name in stored.notes.older_names}
    renamed = {older.get(name, name): x for name, x in stored.tensors.items()}
    return stored.replace(tensors=dict(sorted(renamed.items())))


def narrow_integers(stored: Stored) -> Stored:
    """Read the family's `int64_tensors` as int32, and note those that are stored in int64."""
    patterns = stored.family.int64_tensors
    tensors = dict(stored.tensors)
    wide = [name for name, x in tensors.items() if x.dtype == np.int64 and any(re.search(p, name) for p in patterns)]
    for name in wide:
        tensors[name] = _convert_integers(tensors[name], np.dtype(np.int32))
    return stored.replace(tensors=tensors, int64_names=tuple(wide))


def widen_integers(stored: Stored) -> Stored:
    """Undo `narrow_integers`."""
    wide = stored.notes.int64_names
    tensors = {
        name: _convert_integers(x, np.dtype(np.int64)) if name in wide else x for name, x in stored.tensors.items()
    }
    return stored.replace(tensors=tensors)


def _convert_integers(tensor: LazyTensor, dtype: np.dtype) -> LazyTensor:
    """Return a tensor of whole numbers in another dtype. Numbers beyond int32 wrap around."""
    return LazyTensor(dtype, tensor.shape, lambda: tensor.read().astype(dtype), tensor.release)


def note_base_prefix(stored: Stored, name_map: NameMap) -> Stored:
    """Note if no tensor has the base model's prefix (`model.`), as in files of a model without its head."""
    has_prefix = any(name.startswith(_find_base_prefix(name_map)) for name in stored.tensors)
    lacks_it = stored.notes.wrapping is None and bool(stored.tensors) and not has_prefix
    return stored.replace(lacks_base_prefix=lacks_it)


def map_names(config: Config, notes: Origin) -> NameMap:
    """Return the name map of a checkpoint's files, which may be multimodal, or lack the base model's prefix."""
    name_map = rename_all(name_tensors(notes.family, config), notes.wrapping)
    if not notes.lacks_base_prefix:
        return name_map
    prefix = _find_base_prefix(name_map)
    return {name.removeprefix(prefix): mapping for name, mapping in name_map.items()}


def _find_base_prefix(name_map: NameMap) -> str:
    return next(iter(name_map)).partition(".")[0] + "."


def pack(stored: Stored, model: _Model, name_map: NameMap, location: str) -> tuple[Stored, _Model]:
    """Hold the matrices packed that the config still says are quantized: in the tensors, and in the model in shapes.
    Layers of MXFP4 are built packed.

    **Raises** `CheckpointError` as `pack_model` does.
    """
    _, quantized = split_quantization(stored.config)
    if quantized is None:
        return stored, model
    packed, tensors, side_tensors = pack_model(model, name_map, stored.tensors, quantized, location)
    return stored.replace(tensors=tensors, packed=list_packed(packed), side_tensors=side_tensors), packed


def unpack(stored: Stored) -> Stored:
    """Undo `pack` for the layers that are packed still."""
    _, quantized = split_quantization(stored.config)
    if quantized is None:
        return stored
    return stored.replace(tensors=unpack_tensors(stored.tensors, quantized, stored.notes.side_tensors))


def name_plain_matrices(stored: Stored) -> Stored:
    """Name the modules of plain matrices in the `quantization_config` of a model that was not read packed: readers must
    know that they are not quantized."""
    _, quantized = split_quantization(stored.config)
    if quantized is None or stored.notes.packed:
        return stored
    matrices = [name for name, x in stored.tensors.items() if name.endswith(".weight") and len(x.shape) == 2]
    plain = {"lm_head", *(name.removesuffix(".weight") for name in matrices)}
    quantization = {"ignore": sorted(plain), **stored.config[QUANTIZATION_KEY]}
    return stored.replace(config={**stored.config, QUANTIZATION_KEY: quantization})


def note_lacking(stored: Stored, planned: Collection[str]) -> Stored:
    """Note the family's optional tensors among those `planned` if the files have none of them."""
    patterns = stored.family.optional_tensors
    optional = {name for name in planned if any(re.search(pattern, name) for pattern in patterns)}
    if optional & stored.tensors.keys():
        return stored
    return stored.replace(lacking=tuple(sorted(optional)))


def drop_lacking(stored: Stored) -> Stored:
    """Undo `note_lacking`: do not write what the files lacked."""
    return stored.replace(tensors=drop_tensors(stored.tensors, stored.notes.lacking))


def note_head_copies(stored: Stored, config: Config) -> tuple[Stored, dict[str, str]]:
    """Note the tensors of predictors that repeat the embedding or the head; return them -> what they repeat."""
    listed = list_head_copies(stored.family, config, stored.notes.wrapping)
    copies = {copy: name for copy, name in listed.items() if copy in stored.tensors}
    return stored.replace(head_copies=tuple(copies)), copies


def restore_head_copies(stored: Stored) -> Stored:
    """Undo `note_head_copies`: write the embedding and the head where the files had them once more."""
    listed = list_head_copies(stored.family, read_written_config(stored.notes), stored.notes.wrapping)
    copies = {copy: stored.tensors[name] for copy, name in listed.items() if copy in stored.notes.head_copies}
    return stored.replace(tensors=dict(sorted({**stored.tensors, **copies}.items())))


def read_written_config(origin: Origin) -> Config:
    """Return the config of a model that was loaded, as its family reads it."""
    config = read_config(origin.family, split_quantization(json.loads(origin.config))[0])
    return set_predictors(config, origin.predictors)


def read_name_map(origin: Origin) -> NameMap:
    """Return the name map of the files that a model was loaded from."""
    return map_names(read_written_config(origin), origin)


def read_callers(origin: Origin) -> Mapping[str, str]:
    """Return the names of modules that layers of these files share: see `list_callers`."""
    return list_callers(read_written_config(origin), origin)
