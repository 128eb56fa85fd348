"""Files of safetensors: a header of names, dtypes, shapes and places, then the numbers. Nothing in them can run.

Read by mapping the file, so that a tensor is read when it is touched and only where it is; written tensor by tensor.
Every header is checked before anything is read through it: places must tile the file exactly.
"""

import dataclasses
import json
import math
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from zoo.models.hf.spec import Shape, TensorMapping

DTYPES: dict[str, np.dtype] = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (64, 32, 16)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (64, 32, 16, 8)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (64, 32, 16, 8)},
    "BF16": np.dtype(jnp.bfloat16),
    "BOOL": np.dtype(bool),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
}
_DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
_DTYPE_ORDER: Sequence[str] = "U64 I64 F64 F32 U32 I32 BF16 F16 U16 I16 F8_E4M3 F8_E5M2 I8 U8 BOOL".split()
"""In which `safetensors` writes tensors: by dtype, and those of one dtype by name."""
_MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT = 64  # JAX takes a buffer on the CPU as it is, without a copy, where it begins at a multiple of this


_MAX_ERROR_LENGTH = 1600


class CheckpointError(ValueError):
    """A directory that is no checkpoint that we can read: says what is wrong, where, and what would do.

    A damaged file may hold names and values of any length and of any characters: the message stays short, printable.
    """

    def __init__(self, message: str):
        if len(message) > _MAX_ERROR_LENGTH:
            message = f"{message[: _MAX_ERROR_LENGTH - 400]} [...] {message[-400:]}"
        super().__init__(message.encode(errors="backslashreplace").decode())


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """One tensor of a checkpoint, not read yet."""

    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    """Its numbers, as a view of where they are: not to be written to."""
    release: Callable[[], None] = lambda: None
    """Let go of what was read of the file so far; it can be read again."""
    zero_copy: bool = False
    """Whether a model may keep these very numbers in place of a copy."""
    views: Callable[[TensorMapping, Sequence[Shape], int], Sequence[Any]] | None = None
    """What `row.views` would give of its numbers, where these are made only when a part is indexed."""

    def read_part(self, mapping: TensorMapping, shapes: Sequence[Shape], num_stacked_dims: int, number: int) -> Any:
        """One of the parts that a row of a table has in it, in its own shape: to be indexed with slices."""
        views = (
            mapping.views(self.read(), shapes, num_stacked_dims)
            if self.views is None
            else self.views(mapping, shapes, num_stacked_dims)
        )
        return views[number].reshape(shapes[number])


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Every tensor of one file, by name. Only the header is read.

    **Raises** `CheckpointError` for a header that is damaged, or does not fit the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path}: no safetensors file, or a truncated one: {size} bytes, which should begin with the length of "
                "a header that fits into them"
            )
        text = file.read(length)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        header = json.loads(text.decode(), object_pairs_hook=reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is damaged: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is damaged: a table of tensors was expected")
    header.pop("__metadata__", None)
    found = {name: _parse_header_entry(path, name, facts) for name, facts in header.items()}
    end = 0
    for name, (_, _, start, stop) in sorted(found.items(), key=lambda item: item[1][2:]):
        if start != end:
            raise CheckpointError(
                f"{path}: {name} begins at byte {start} of the data, and what is before ends at {end}"
            )
        end = stop
    if end != size - 8 - length:
        raise CheckpointError(
            f"{path}: truncated, or longer than it says: its header speaks of {end} bytes of data, and there are "
            f"{size - 8 - length}"
        )
    numbers = np.frombuffer(mapped, np.uint8)

    def forget() -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)

    def tensor(dtype: np.dtype, shape: tuple[int, ...], start: int, stop: int) -> LazyTensor:
        place = slice(8 + length + start, 8 + length + stop)
        return LazyTensor(dtype, shape, lambda: numbers[place].view(dtype).reshape(shape), forget)

    return {name: tensor(*facts) for name, facts in found.items()}


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands in it twice")
    return table


def _parse_header_entry(path: Path, name: str, header_entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """What a header says of one tensor. **Raises** `CheckpointError` where that is not possible."""
    if not isinstance(header_entry, dict) or header_entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: its header is damaged at {name!r}: dtype, shape and data_offsets were expected")
    code, shape, offsets = header_entry["dtype"], header_entry["shape"], header_entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(f"{path}: {name} has the dtype {code!r}, and we read {', '.join(DTYPES)}")
    if not (_is_count_list(shape) and _is_count_list(offsets) and len(offsets) == 2):
        raise CheckpointError(f"{path}: its header is damaged at {name!r}: {shape=}, data_offsets={offsets}")
    start, stop = offsets
    size = math.prod(shape) * DTYPES[code].itemsize
    if stop - start != size:
        takes = f"{size} bytes" if size < 2**62 else "more bytes than any file has"
        raise CheckpointError(
            f"{path}: {name} is {code}{shape}, which takes {takes}, and its header gives it {stop - start}"
        )
    return DTYPES[code], tuple(shape), start, stop


def _is_count_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**62 for x in value)


def write_safetensors(path: Path, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]], tensor: Callable) -> None:
    """A file of these tensors, as `safetensors` itself writes it. `tensor(name)` is called for one after another."""
    shapes = dict(sorted(shapes.items(), key=lambda item: (_DTYPE_ORDER.index(_DTYPE_CODES[item[1][1]]), item[0])))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            file.write(np.ascontiguousarray(tensor(name)).reshape(-1).view(np.uint8).data)


def empty_aligned(shape: Iterable[int], dtype: Any) -> np.ndarray:
    """An array that JAX takes on the CPU without a copy."""
    shape, dtype = tuple(shape), np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
