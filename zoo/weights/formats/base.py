"""Base class of quantized file formats: the tensors that store a matrix, and how to decode them.

Every format of scaled groups is the same formula over differently stored codes:

    W[o, i] = scales[o, g(i)] (codes[o, i] - zeros[o, g(i)])        g(i) the group of input i

in float32, with one rounding. A format reads codes, scales and zero points of any rows and columns.
"""

import abc
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from zoo.layers.quantized.groups import AbstractGroupLinear, GroupQuantizedLinear
from zoo.models.hf.errors import ConfigError
from zoo.models.hf.values import WORD, is_any_of, list_of, optional
from zoo.ops.quantized.groups import CodeKind
from zoo.parallel import Dim

from ..safetensors import LazyTensor

Parts = Mapping[str, LazyTensor]
"""The tensors of one quantized matrix, by the end of their names: `{"qweight": ..., "scales": ...}`."""
_CHUNK_ELEMENTS = 1 << 22


@dataclasses.dataclass(frozen=True)
class AbstractQuantizedFormat(abc.ABC):
    """A quantized file format of scaled groups (see the module's formula), with the options that a
    `quantization_config` gives."""

    name: ClassVar[str]
    """The format in words, for messages."""
    left_out: tuple[str, ...] = dataclasses.field(kw_only=True, default=())
    """Modules that the config declares not to be quantized."""

    @property
    @abc.abstractmethod
    def suffixes(self) -> Mapping[str, Collection[Any]]:
        """Tensors of a matrix NAME: the end of each name, `NAME.qweight`, and its dtypes."""

    optional_suffixes: ClassVar[Mapping[str, Collection[Any]]] = {}
    """Tensors that a matrix may have in addition."""

    @property
    def side_suffixes(self) -> tuple[str, ...]:
        """Small tensors of a matrix that are written back from `Origin.side_tensors`: tensors that its numbers do not
        depend on, such as scales of activations, and tensors that a packed layer holds in another shape."""
        return ()

    def is_quantized_weight(self, tensor: LazyTensor) -> bool:
        """Return True for the dtype of codes, where they are stored as `NAME.weight`."""
        return "weight" in self.suffixes and tensor.dtype in map(np.dtype, self.suffixes["weight"])

    @abc.abstractmethod
    def find_shape(self, parts: Parts) -> tuple[int, int]:
        """Return (out, in) of the matrix. Called before `find_errors`: parts may have any shape."""

    @abc.abstractmethod
    def list_shapes(self, out: int, in_: int, parts: Parts) -> Mapping[str, Collection[tuple[int, ...]]]:
        """Return the shapes that each part of an (out, in) matrix may have."""

    def find_errors(self, name: str, parts: Parts) -> Iterator[str]:
        """Yield a message for each part of the matrix `name` that has a wrong shape."""
        try:
            out, in_ = self.find_shape(parts)
        except (ValueError, IndexError):
            listed = ", ".join(f"{suffix} {list(part.shape)}" for suffix, part in parts.items())
            yield f"{name} has {listed}, which are not parts of a matrix"
            return
        for suffix, shapes in self.list_shapes(out, in_, parts).items():
            if suffix in parts and parts[suffix].shape not in shapes:
                expected = " or ".join(str(list(shape)) for shape in shapes)
                yield (
                    f"{name}.{suffix} is {list(parts[suffix].shape)}: expected {expected} for a matrix of "
                    f"[{out}, {in_}]"
                )

    def is_left_out(self, module: str) -> bool:
        """Return True for a module that the config declares not to be quantized: by its name, by the first or last
        words of its name, or by a pattern `re:...`."""
        return any(_names_module(entry, module) for entry in self.left_out)

    @property
    @abc.abstractmethod
    def kind(self) -> CodeKind:
        """Return the number format of the codes."""

    @property
    @abc.abstractmethod
    def input_group(self) -> int | None:
        """Return the number of consecutive inputs in a group; None for one group of all."""

    @property
    def scale_field(self) -> str:
        """Return the field of the packed layer that `read_scales` fills."""
        return "scales"

    @property
    def has_zeros(self) -> bool:
        """True if zero points are stored, and not the same for all."""
        return False

    @property
    def is_reordered(self) -> bool:
        """True if the group of each input is stored, and may be any."""
        return False

    @abc.abstractmethod
    def read_codes(self, parts: Parts, rows: np.ndarray, columns: slice) -> np.ndarray:
        """Return the codes of some rows and columns: uint8, or float8 or int8 with their own meaning."""

    @abc.abstractmethod
    def read_scales(self, parts: Parts, rows: np.ndarray) -> np.ndarray:
        """Return the scales "rows groups" as stored."""

    def read_zeros(self, name: str, parts: Parts, rows: np.ndarray) -> np.ndarray | int:
        """Return the zero points "rows groups", or the one zero point of all groups."""
        return 0

    @abc.abstractmethod
    def read_groups(self, name: str, parts: Parts, columns: slice) -> np.ndarray:
        """Return the group of each column."""

    def find_packing_errors(self, name: str, parts: Parts) -> Iterator[str]:
        """Yield the reasons why the matrix could not be written as it is stored, if it was held packed."""
        yield from ()

    def make_layer(self, in_size: int, out_size: int, *, in_: Dim, out: Dim) -> AbstractGroupLinear:
        """Return a layer that holds a matrix packed. **Raises** `ValueError` for sizes that it cannot have."""
        options = {"has_zeros": self.has_zeros, "reordered": self.is_reordered, "in_": in_, "out": out}
        return GroupQuantizedLinear(in_size, out_size, kind=self.kind, group_size=self.input_group, **options)

    def list_whole_vectors(self) -> tuple[str, ...]:
        """Return the one-dimensional fields of the packed layer that belong to the whole matrix, and not to rows."""
        if not self.is_reordered:
            return ()
        return ("group_index",)

    def view_vectors(self, name: str, parts: Parts) -> Mapping[str, LazyTensor]:
        """Return the further arrays of the packed layer, by their fields."""
        if not self.is_reordered:
            return {}
        in_ = self.find_shape(parts)[1]
        read = lambda: self.read_groups(name, parts, slice(0, in_))
        return {"group_index": LazyTensor(np.dtype(np.int32), (in_,), read, keeps_dtype=True)}

    @abc.abstractmethod
    def list_file_parts(self, out: int, in_: int, scales: np.dtype) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        """Return shape and dtype of each tensor of a matrix, except side tensors. Scales are stored in the dtype
        `scales`."""

    @abc.abstractmethod
    def encode_part(self, suffix: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Return one tensor of a matrix. `read` returns its codes "out in", scales and zeros "out groups", and vectors,
        by their fields."""

    def decode(self, name: str, parts: Parts, rows: np.ndarray, columns: slice) -> np.ndarray:
        """Return `W[rows, columns]` in float32. `columns` has both ends, and has no step."""
        groups = self.read_groups(name, parts, columns)
        codes = self.read_codes(parts, rows, columns).astype(np.float32)
        zeros = self.read_zeros(name, parts, rows)
        if isinstance(zeros, int):
            codes -= np.float32(zeros)
        else:
            codes -= zeros.astype(np.float32)[:, groups]
        codes *= self.read_scales(parts, rows).astype(np.float32)[:, groups]
        return codes


def read_in_chunks(
    read: Callable[[np.ndarray, slice], np.ndarray], rows: np.ndarray, columns: slice, dtype: Any
) -> np.ndarray:
    """Return `read(rows, columns)`, read a few rows at a time, so that codes are never unpacked all at once."""
    numbers = np.empty((len(rows), columns.stop - columns.start), dtype)
    size = max(1, _CHUNK_ELEMENTS // max(1, numbers.shape[1]))
    for start in range(0, len(rows), size):
        with np.errstate(invalid="ignore", over="ignore"):  # numbers that are not finite are refused when written
            numbers[start : start + size] = read(rows[start : start + size], columns)
    return numbers


def unpack_words(words: np.ndarray, index: np.ndarray, bits: int, order: Iterable[int] = ()) -> np.ndarray:
    """Return the numbers at `index` among the numbers that int32 words hold along the last dim, 32 / bits each. The
    number at bits `bits p` of a word is its number `order[p]`; by default p."""
    per_word = 32 // bits
    positions = np.argsort([*order] or range(per_word)).astype(np.uint32)
    shifts = np.uint32(bits) * positions[index % per_word]
    return ((words.view(np.uint32)[..., index // per_word] >> shifts) & np.uint32(2**bits - 1)).astype(np.uint8)


def pack_words(numbers: np.ndarray, bits: int, order: Iterable[int] = ()) -> np.ndarray:
    """Return int32 words that hold the numbers of the last dim: the inverse of `unpack_words`."""
    per_word = 32 // bits
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // per_word), np.uint32)
    for place, number in enumerate([*order] or range(per_word)):
        words |= numbers[..., number::per_word].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def take_rows(array: np.ndarray, rows: np.ndarray, axis: int = 0) -> np.ndarray:
    """Return some rows of a memory-mapped array: consecutive ones as a view."""
    index: np.ndarray | slice = rows
    if len(rows):
        first = int(rows[0])
        if np.array_equal(rows, np.arange(first, first + len(rows))):
            index = slice(first, first + len(rows))
    return array[index] if axis == 0 else array[:, index]


def count_groups(size: int, group_size: int) -> int:
    """Return the number of groups of `size` elements; the last one may be smaller."""
    return -(-size // group_size)


def check_options(config: Mapping[str, Any], required: Mapping[str, Collection[Any]], ignored: Collection[str]) -> None:
    """Check a `quantization_config`: values of the keys in `required`, and no key besides these and `ignored`.

    **Raises** `ConfigError` that names all keys that are unknown or have another value.
    """
    method = config.get("quant_method")
    errors = [
        f"{key} = {value!r}, and {_list_values(required[key])} is read"
        for key, value in config.items()
        if key in required and not is_any_of(value, required[key])
    ]
    errors += [
        f"{key} = {value!r} is not a key of {method!r} that we know"
        for key, value in config.items()
        if key not in required and key not in ignored and key != "quant_method" and value is not None
    ]
    if errors:
        raise ConfigError("quantization_config: " + "; ".join(errors))


def read_names(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return the module names under the first of `keys` that is given. **Raises** `ConfigError` unless it is a list of
    names, and for an invalid pattern."""
    for key in keys:
        if error := optional(list_of(WORD)).find_error(names := config.get(key)):
            raise ConfigError(f"quantization_config: {key} = {names!r} {error}")
        if names:
            for name in names:
                _check_pattern(name)
            return tuple(names)
    return ()


def _list_values(values: Collection[Any]) -> str:
    """Return the values in words; None, which is an absent key, only if there is no other."""
    return " or ".join(repr(x) for x in values if x is not None or len(values) == 1)


def _names_module(entry: str, module: str) -> bool:
    """Return True for a name that is the module's, or its first or last words, and for a pattern that matches it."""
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return f".{module}.".startswith(f".{entry}.") or f".{module}.".endswith(f".{entry}.")


def _check_pattern(name: str) -> None:
    if not name.startswith("re:"):
        return
    try:
        re.compile(name[3:])
    except re.error as error:
        raise ConfigError(f"quantization_config: {name!r} is not a regular expression: {error}") from None
