"""Read and write safetensors files: a header of names, dtypes, shapes and byte offsets, then raw data. No code in them.

The library `safetensors` validates a file before any data is read: its tensors must fill it exactly. We then map the
file into memory, and a tensor is a view, paged in only when and where it is indexed. (The library's own arrays are
copies, and none are FP8.) A checkpoint is one such file, or several shards with an index.
"""

import dataclasses
import json
import math
import mmap
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from zoo._files import create_files, open_regular, parse_json, read_limited
from zoo._terminal import escape_controls
from zoo.models.hf.spec import Shape, TensorMapping

SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

DTYPES: dict[str, np.dtype] = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (64, 32, 16)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (64, 32, 16, 8)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (64, 32, 16, 8)},
    "BF16": np.dtype(jnp.bfloat16),
    "BOOL": np.dtype(bool),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
_DTYPE_ORDER: Sequence[str] = "U64 I64 F64 F32 U32 I32 BF16 F16 U16 I16 F8_E4M3 F8_E5M2 I8 U8 BOOL".split()
"""The order in which `safetensors` writes tensors: by dtype, then by name."""
_MAX_INDEX_BYTES = 100_000_000
_MAX_CONFIG_BYTES = 10_000_000
_MAX_ERROR_LENGTH = 1600
MAX_LISTED = 20


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be read or written. The message says what is wrong, where, and what would help.

    A damaged file may hold names and values of any length and with any characters; the message stays short and
    printable.
    """

    def __init__(self, message: str):
        if len(message) > _MAX_ERROR_LENGTH:
            message = f"{message[: _MAX_ERROR_LENGTH - 400]} [...] {message[-400:]}"
        super().__init__(escape_controls(message, keep="\n"))


def raise_problems(headline: str, problems: Collection[str]) -> None:
    """**Raises** `CheckpointError` that lists the first problems in order, if there are any."""
    if not problems:
        return
    listed = sorted(problems)[:MAX_LISTED]
    if len(problems) > MAX_LISTED:
        listed.append(f"and {len(problems) - MAX_LISTED} more")
    raise CheckpointError("\n  ".join([headline, *listed]))


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """One tensor of a checkpoint, read on demand: from a file, or from the arrays of a model."""

    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    """Return the data as a read-only view, not a copy."""
    release: Callable[[], None] = lambda: None
    """Drop the pages that were read from the file; they can be read again."""
    zero_copy: bool = False
    """True if a model may keep this buffer itself instead of a copy."""
    views: Callable[[TensorMapping, Sequence[Shape], int], Sequence[Any]] | None = None
    """A replacement of `TensorMapping.views` for data that is decoded only when a view is indexed."""
    keeps_dtype: bool = False
    """True if a model holds the data in this dtype, whatever dtype its parameters have."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read_part(self, mapping: TensorMapping, shapes: Sequence[Shape], num_stacked_dims: int, number: int) -> Any:
        """Return part `number` of the tensor's `mapping`, in the parameter's shape, to be indexed with slices."""
        if self.views is None:
            views = mapping.views(self.read(), shapes, num_stacked_dims)
        else:
            views = self.views(mapping, shapes, num_stacked_dims)
        return views[number].reshape(shapes[number])


def hold_array(array: Any, *, zero_copy: bool = False) -> LazyTensor:
    """Return an array in memory as a tensor that may be read on demand."""
    return LazyTensor(np.dtype(array.dtype), array.shape, lambda: np.asarray(array), zero_copy=zero_copy)


def open_tensors(directory: Path) -> dict[str, LazyTensor]:
    """Return every tensor of a checkpoint by name, from one safetensors file or from shards. Reads headers only.

    With both, the one file is read, as in transformers, and `find_stray_index` names the index.

    **Raises** `CheckpointError` without a safetensors file, for a damaged file, and for an index that points outside
    the directory or disagrees with its shards.
    """
    if os.path.exists(directory / SAFE_WEIGHTS_NAME):
        return open_safetensors(directory / SAFE_WEIGHTS_NAME)
    if os.path.exists(directory / SAFE_WEIGHTS_INDEX_NAME):
        return _open_shards(directory)
    file_names = sorted(escape_controls(path.name) for path in directory.iterdir())
    pickled = [name for name in file_names if name.endswith(PICKLE_SUFFIXES)]
    if pickled:
        raise CheckpointError(
            f"{directory} has its weights pickled, in {pickled[0]}: unpickling a file runs the code in it, so we never "
            "do. If you trust it, transformers writes safetensors: "
            f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(...)"
        )
    raise CheckpointError(
        f"{directory} has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}, "
        f"but {', '.join(file_names[:8]) or 'nothing at all'}"
    )


def find_stray_index(directory: Path) -> str:
    """Return a message about a `model.safetensors` next to an index of other files; "" unless there are both."""
    whole = directory / SAFE_WEIGHTS_NAME
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if not (os.path.exists(whole) and os.path.exists(index)):
        return ""
    try:
        weight_map = read_json(index, limit=_MAX_INDEX_BYTES).get("weight_map")
    except CheckpointError:  # nobody reads it
        return ""
    shards = {str(file) for file in weight_map.values()} if isinstance(weight_map, dict) else set()
    if not shards or shards == {SAFE_WEIGHTS_NAME}:
        return ""
    return (
        f"{whole} is read, and not the {len(shards)} files of {SAFE_WEIGHTS_INDEX_NAME} next to it: delete the one, or "
        "the index and its files"
    )


def _open_shards(directory: Path) -> dict[str, LazyTensor]:
    """Return the tensors of all shards that the index lists. **Raises** `CheckpointError` where the two disagree."""
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    weight_map = read_json(index, limit=_MAX_INDEX_BYTES).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise CheckpointError(f"{index} is damaged: expected a weight_map from tensors to files")
    tensors: dict[str, LazyTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if shard != Path(shard).name or "\\" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {shard!r}: shards must be safetensors files in the same directory")
        if not os.path.exists(directory / shard):
            raise CheckpointError(f"{index} names {shard!r}, and there is no such file in {directory}")
        shard_tensors = open_safetensors(directory / shard)
        listed = {name for name, file in weight_map.items() if file == shard}
        if wrong := sorted(listed ^ shard_tensors.keys()):
            where = "in the index but not in the file" if wrong[0] in listed else "in the file but not in the index"
            raise CheckpointError(f"{directory / shard} and {index} disagree: {wrong[0]} is {where}")
        tensors |= shard_tensors
    return tensors


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Memory-map one safetensors file and return its tensors by name. Reads the header only.

    **Raises** `CheckpointError` for a file that cannot be opened, that `safetensors` refuses, or that holds a dtype
    which NumPy and JAX lack.
    """
    try:
        file = open_regular(path)  # `safe_open` would wait for the writer of a pipe
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    with file:
        try:
            with safe_open(path, framework="numpy") as opened:
                slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
                entries = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged, or not a safetensors file: {error}") from None
        header_length = int.from_bytes(file.read(8), "little")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(mapped, np.uint8)

    def release() -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)

    def make_tensor(dtype: np.dtype, shape: tuple[int, ...], span: slice) -> LazyTensor:
        return LazyTensor(dtype, shape, lambda: data[span].view(dtype).reshape(shape), release)

    tensors: dict[str, LazyTensor] = {}
    start = 8 + header_length
    for name, (code, shape) in entries.items():  # in the file's order and without gaps, as `safe_open` has verified
        if code not in DTYPES:
            raise CheckpointError(f"{path}: {name} has the dtype {code}, and we read {', '.join(DTYPES)}")
        stop = start + math.prod(shape) * DTYPES[code].itemsize
        tensors[name] = make_tensor(DTYPES[code], shape, slice(start, stop))
        start = stop
    return tensors


def read_json(path: Path, *, limit: int = _MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of at most `limit` bytes.

    **Raises** `CheckpointError` for a file that is missing, damaged, too large or not a regular file, and for JSON that
    is not an object.
    """
    try:
        content = read_limited(path, limit)
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    try:
        value = parse_json(content, _make_object)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: expected a JSON object")
    return value


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build the dict of a JSON object. **Raises** `ValueError` for a name that occurs twice, or that has control
    characters, which would reach the terminal or forge lines of a table."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    if (name := next((name for name in table if escape_controls(name) != name), None)) is not None:
        raise ValueError(f"the name {name!r} has control characters")
    return table


def write_safetensors(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write a file of arrays, atomically. See `write_tensors`."""
    with create_files(path.parent) as create:
        write_tensors(create(path.name), {name: hold_array(array) for name, array in arrays.items()})


def write_tensors(file: BinaryIO, tensors: Mapping[str, LazyTensor]) -> None:
    """Write tensors to an open file, byte for byte as `safetensors` does. Each is read when it is written, and released
    then, so one is in memory at a time."""
    ordered = order_tensors(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered.items():
        start = end
        end = end + tensor.nbytes
        code = DTYPE_CODES[tensor.dtype]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in ordered.values():
        file.write(np.ascontiguousarray(tensor.read()).reshape(-1).view(np.uint8).data)
        tensor.release()


def order_tensors(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return tensors in the order of a file: by dtype, then by name."""
    return dict(sorted(tensors.items(), key=lambda item: (_DTYPE_ORDER.index(DTYPE_CODES[item[1].dtype]), item[0])))
