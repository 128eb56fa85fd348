"""Tensors of quantized files that are decoded when they are read: each slice by itself, from its own bytes."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from zoo.models.hf.spec import Shape, TensorMapping

from ..safetensors import CheckpointError, LazyTensor
from .base import AbstractQuantizedFormat, Parts, read_in_chunks

_ReadPart = Callable[[np.ndarray, slice], np.ndarray]
"""Return some rows, by their numbers, and a range of columns of a matrix."""


def find_quantized(
    tensors: Mapping[str, LazyTensor], quantized: AbstractQuantizedFormat, location: str
) -> dict[str, dict[str, LazyTensor]]:
    """Return the parts of each quantized matrix, by the name of its module.

    **Raises** `CheckpointError` for parts that are missing, or of a wrong dtype or shape, for scales of several dtypes,
    and for modules that the config declares not to be quantized.
    """
    kinds = {**quantized.suffixes, **quantized.optional_suffixes}
    found: dict[str, dict[str, LazyTensor]] = {}
    for suffix in kinds:
        for name, tensor in tensors.items():
            if name.endswith(f".{suffix}") and (suffix != "weight" or quantized.is_quantized_weight(tensor)):
                found.setdefault(name.removesuffix(f".{suffix}"), {})[suffix] = tensor
    errors = []
    for name, parts in sorted(found.items()):
        if missing := [suffix for suffix in quantized.suffixes if suffix not in parts]:
            errors += _describe_missing(name, parts, missing, tensors)
        elif wrong := [suffix for suffix, x in parts.items() if x.dtype not in map(np.dtype, kinds[suffix])]:
            expected = [" or ".join(np.dtype(kind).name for kind in kinds[suffix]) for suffix in wrong]
            listed = zip(wrong, expected, strict=True)
            errors += [f"{name}.{end} is {parts[end].dtype}: expected {kind}" for end, kind in listed]
        elif quantized.is_left_out(name):
            errors.append(f"{name} is quantized, and the config declares that it is not")
        else:
            errors += quantized.find_errors(name, parts)
    errors = errors or list(_find_odd_scales(found))
    if errors:
        raise CheckpointError(f"{location} has tensors that are not {quantized.name}: " + "; ".join(errors[:8]))
    return found


def _find_odd_scales(found: Mapping[str, Parts]) -> Iterator[str]:
    """Yield a message for each floating-point part of another dtype than most parts of that name. One program wrote
    them all, and float16 bits read as bfloat16 silently give other numbers."""
    for suffix in dict.fromkeys(suffix for parts in found.values() for suffix in parts):
        dtypes = {name: parts[suffix].dtype for name, parts in found.items() if suffix in parts}
        usual, count = Counter(dtypes.values()).most_common(1)[0]
        if not jnp.issubdtype(usual, jnp.floating):
            continue
        for name, dtype in dtypes.items():
            if dtype != usual:
                yield f"{name}.{suffix} is {dtype}, where {count} of {len(dtypes)} are {usual}"


def _describe_missing(name: str, parts: Parts, missing: Sequence[str], tensors: Mapping[str, LazyTensor]) -> list[str]:
    """Return messages for a matrix that lacks some of its parts."""
    present = next(iter(parts))
    described = []
    for suffix in missing:
        if (tensor := tensors.get(f"{name}.{suffix}")) is not None:
            described.append(f"{name}.{suffix} is {tensor.dtype}, beside its {name}.{present}")
        else:
            described.append(f"{name}.{present} lacks its {name}.{suffix}")
    return described


def dequantize_lazily(
    quantized: AbstractQuantizedFormat, tensors: Mapping[str, LazyTensor], location: str
) -> dict[str, LazyTensor]:
    """Replace the parts of each quantized matrix by a tensor `NAME.weight` (out, in) that is decoded when it is read,
    with the dtype of the largest tensor that is not quantized.

    **Raises** `CheckpointError` as `find_quantized` does.
    """
    found = find_quantized(tensors, quantized, location)
    plain = drop_parts(tensors, found, quantized)
    dtype = find_usual_dtype(plain)

    def make(name: str, parts: Parts) -> LazyTensor:
        decode = lambda rows, columns: quantized.decode(name, parts, rows, columns)
        read_part = lambda rows, columns: read_in_chunks(decode, rows, columns, np.float32)
        return make_lazy_matrix(f"{name}.weight", dtype, quantized.find_shape(parts), read_part, parts)

    return plain | {f"{name}.weight": make(name, parts) for name, parts in found.items()}


def find_usual_dtype(tensors: Mapping[str, LazyTensor]) -> np.dtype:
    """Return the dtype of the largest floating-point tensor; bfloat16 without any."""
    floating = [x for x in tensors.values() if jnp.issubdtype(x.dtype, jnp.floating)]
    if not floating:
        return np.dtype(jnp.bfloat16)
    return max(floating, key=lambda x: math.prod(x.shape)).dtype


def drop_parts(
    tensors: Mapping[str, LazyTensor], found: Mapping[str, Parts], quantized: AbstractQuantizedFormat
) -> dict[str, LazyTensor]:
    """Return the tensors that do not belong to a quantized matrix."""
    ends = (*quantized.side_suffixes, *quantized.optional_suffixes)
    dropped = {f"{name}.{suffix}" for name, parts in found.items() for suffix in (*parts, *ends)}
    return {name: x for name, x in tensors.items() if name not in dropped}


def make_lazy_matrix(
    name: str, dtype: np.dtype, shape: tuple[int, int], read_part: _ReadPart, parts: Parts, *, keeps_dtype: bool = False
) -> LazyTensor:
    """Return a tensor of `shape` whose slices `read_part` reads. `parts` are released with it."""
    out, columns = shape

    def read() -> np.ndarray:
        return read_part(np.arange(out), slice(0, columns)).astype(dtype)

    def views(mapping: TensorMapping, shapes: Sequence[Shape], num_stacked_dims: int) -> list[_MatrixView]:
        is_plain = not (mapping.transposed or mapping.leading_ones or mapping.conv1d_filters)
        if not is_plain or mapping.columns or mapping.in_dims or num_stacked_dims:
            raise CheckpointError(f"{name} is quantized, and only matrices stored as (out, in) are read so")
        row_numbers = mapping.views(np.arange(out)[:, None], [(shape[0], 1) for shape in shapes], 0)
        return [_MatrixView(rows.reshape(-1), read_part) for rows in row_numbers]

    def release() -> None:
        for part in parts.values():
            part.release()

    return LazyTensor(dtype, shape, read, release, views=views, keeps_dtype=keeps_dtype)


@dataclasses.dataclass(frozen=True)
class _MatrixView:
    """A part of a matrix that is read when it is indexed."""

    rows: np.ndarray
    """The rows of the matrix that the part consists of, in order."""
    read_part: _ReadPart

    def reshape(self, shape: Shape) -> "_MatrixView":
        return self

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """Read a slice. `index` has two slices of step 1 with both ends."""
        rows, columns = index
        return self.read_part(self.rows[rows], columns)
