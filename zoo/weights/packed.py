"""Dequantize MXFP4 checkpoints lazily: each slice is decoded when it is read."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zoo.models.hf.spec import Shape, TensorMapping
from zoo.ops.quantized.mxfp4 import BLOCK_SIZE, dequantize_mxfp4_numpy

from .formats.lazy import find_usual_dtype
from .safetensors import CheckpointError, LazyTensor

BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
_BLOCK_BYTES = BLOCK_SIZE // 2


def unpack_mxfp4(tensors: Mapping[str, LazyTensor], location: str) -> dict[str, LazyTensor]:
    """Replace each pair `NAME_blocks` (experts, out, in / 32, 16) and `NAME_scales` (experts, out, in / 32) by a lazily
    dequantized tensor `NAME`.

    `NAME` has the shape (experts, in, out), as transformers has it in memory, and the dtype of `NAME_bias`, or else of
    the largest tensor that is not packed.

    **Raises** `CheckpointError` for blocks without scales, scales without blocks, and shapes or dtypes that do not
    match.
    """
    names = [name.removesuffix(BLOCKS_SUFFIX) for name in tensors if name.endswith(BLOCKS_SUFFIX)]
    if errors := [*_find_packing_errors(tensors, names)]:
        raise CheckpointError(f"{location} has tensors that are not MXFP4: " + "; ".join(sorted(errors)[:8]))
    plain = {name: x for name, x in tensors.items() if not name.endswith((BLOCKS_SUFFIX, SCALES_SUFFIX))}
    default = find_usual_dtype(plain)

    def decode(name: str) -> LazyTensor:
        bias = plain.get(f"{name}_bias")
        dtype = bias.dtype if bias and jnp.issubdtype(bias.dtype, jnp.floating) else default
        return _decode_lazily(tensors[name + BLOCKS_SUFFIX], tensors[name + SCALES_SUFFIX], dtype)

    return plain | {name: decode(name) for name in names}


def _find_packing_errors(tensors: Mapping[str, LazyTensor], names: Sequence[str]) -> Iterator[str]:
    """Yield a message for each `_blocks` or `_scales` tensor that has no partner, or another shape or dtype."""
    for name in tensors:
        if name.endswith(SCALES_SUFFIX) and name.removesuffix(SCALES_SUFFIX) not in names:
            yield f"{name} lacks its {name.removesuffix(SCALES_SUFFIX)}{BLOCKS_SUFFIX}"
    for name in names:
        if name + SCALES_SUFFIX not in tensors:
            yield f"{name}{BLOCKS_SUFFIX} lacks its {name}{SCALES_SUFFIX}"
            continue
        blocks = tensors[name + BLOCKS_SUFFIX]
        scales = tensors[name + SCALES_SUFFIX]
        shapes_match = blocks.shape[-1:] == (_BLOCK_BYTES,) and blocks.shape[:-1] == scales.shape
        if not (shapes_match and len(scales.shape) >= 2) or {blocks.dtype, scales.dtype} != {np.dtype(np.uint8)}:
            yield (
                f"{name}{BLOCKS_SUFFIX} is {blocks.dtype}{list(blocks.shape)} and {name}{SCALES_SUFFIX} "
                f"{scales.dtype}{list(scales.shape)}, where uint8[..., N, {_BLOCK_BYTES}] and uint8[..., N] were "
                "expected"
            )


def _decode_lazily(blocks: LazyTensor, scales: LazyTensor, dtype: np.dtype) -> LazyTensor:
    """Return a tensor that is dequantized when it is read. Indexing a part first decodes only the slice."""
    *lead, out, blocks_per_row, _ = blocks.shape

    def read() -> np.ndarray:
        return dequantize_mxfp4_numpy(blocks.read(), scales.read()).swapaxes(-1, -2).astype(dtype)

    def views(mapping: TensorMapping, shapes: Sequence[Shape], num_stacked_dims: int) -> list[Any]:
        mapping = dataclasses.replace(mapping, transposed=not mapping.transposed)  # packed matrices are (out, in)
        # one 16-byte element per block, so that a mapping views packed matrices like any other
        elements = blocks.read().view(np.dtype((np.void, _BLOCK_BYTES)))[..., 0]
        views = (mapping.views(x, shapes, num_stacked_dims) for x in (elements, scales.read()))
        return [_PackedView(*pair) for pair in zip(*views, strict=True)]

    def release() -> None:
        blocks.release()
        scales.release()

    return LazyTensor(dtype, (*lead, blocks_per_row * BLOCK_SIZE, out), read, release, views=views)


@dataclasses.dataclass(frozen=True)
class _PackedView:
    """A view of a packed array that is decoded to float32 when it is indexed."""

    blocks: np.ndarray
    """16 bytes per element."""
    scales: np.ndarray

    def reshape(self, shape: Shape) -> "_PackedView":
        shape = (*shape[:-1], shape[-1] // BLOCK_SIZE)
        return _PackedView(self.blocks.reshape(shape), self.scales.reshape(shape))

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Decode a slice. `index` has one slice per dim, of step 1 and with both ends."""
        *rows, columns = index
        first = columns.start // BLOCK_SIZE
        covering = (*rows, slice(first, -(-columns.stop // BLOCK_SIZE)))
        blocks = np.ascontiguousarray(self.blocks[covering])[..., None].view(np.uint8)
        numbers = dequantize_mxfp4_numpy(blocks, self.scales[covering])
        return numbers[..., columns.start - first * BLOCK_SIZE : columns.stop - first * BLOCK_SIZE]
