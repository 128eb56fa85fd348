"""Checkpoints whose matrices are packed as MXFP4, read as if they were not: piece by piece, as they are asked for."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zoo.models.hf.spec import Shape, TensorMapping
from zoo.ops.quantized.mxfp4 import BLOCK_SIZE, dequantize_mxfp4_numpy

from .safetensors import CheckpointError, LazyTensor

BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
_BLOCK_BYTES = BLOCK_SIZE // 2


def unpack_mxfp4(tensors: Mapping[str, LazyTensor], location: str) -> dict[str, LazyTensor]:
    """The tensors of a checkpoint, with `NAME` in place of `NAME_blocks` (experts, out, in / 32, 16) and `NAME_scales`
    (experts, out, in / 32): shaped (experts, in, out) as transformers has it in memory, and in the dtype of the bias
    beside it, or else of the largest tensor that is not packed.

    **Raises** `CheckpointError` for blocks without scales or scales without blocks, and for shapes or dtypes that do
    not go together.
    """
    names = [name.removesuffix(BLOCKS_SUFFIX) for name in tensors if name.endswith(BLOCKS_SUFFIX)]
    if wrong := [*_find_packing_errors(tensors, names)]:
        raise CheckpointError(f"{location} has tensors that are no MXFP4: " + "; ".join(sorted(wrong)[:8]))
    rest = {name: x for name, x in tensors.items() if not name.endswith((BLOCKS_SUFFIX, SCALES_SUFFIX))}
    floating = [x for x in rest.values() if jnp.issubdtype(x.dtype, jnp.floating)]
    usual = max(floating, key=lambda x: math.prod(x.shape)).dtype if floating else np.dtype(jnp.bfloat16)

    def dtype_of(name: str) -> np.dtype:
        beside = tensors.get(f"{name}_bias")
        return beside.dtype if beside in floating else usual

    return rest | {
        name: _decode_lazily(tensors[name + BLOCKS_SUFFIX], tensors[name + SCALES_SUFFIX], dtype_of(name))
        for name in names
    }


def _find_packing_errors(tensors: Mapping[str, LazyTensor], names: Sequence[str]) -> Iterator[str]:
    for name in tensors:
        if name.endswith(SCALES_SUFFIX) and name.removesuffix(SCALES_SUFFIX) not in names:
            yield f"{name} has no {name.removesuffix(SCALES_SUFFIX)}{BLOCKS_SUFFIX} beside it"
    for name in names:
        if name + SCALES_SUFFIX not in tensors:
            yield f"{name}{BLOCKS_SUFFIX} has no {name}{SCALES_SUFFIX} beside it"
            continue
        blocks, scales = tensors[name + BLOCKS_SUFFIX], tensors[name + SCALES_SUFFIX]
        fit = blocks.shape[-1:] == (_BLOCK_BYTES,) and blocks.shape[:-1] == scales.shape and len(scales.shape) >= 2
        if not fit or {blocks.dtype, scales.dtype} != {np.dtype(np.uint8)}:
            yield (
                f"{name}{BLOCKS_SUFFIX} is {blocks.dtype}{list(blocks.shape)} and {name}{SCALES_SUFFIX} "
                f"{scales.dtype}{list(scales.shape)}, where uint8[..., N, {_BLOCK_BYTES}] and uint8[..., N] were expected"
            )


def _decode_lazily(blocks: LazyTensor, scales: LazyTensor, dtype: np.dtype) -> LazyTensor:
    """A tensor whose numbers are decoded while it is read. One of its parts is indexed before that, so that no more is
    decoded than is asked for."""
    *front, out, blocks_of_a_row, _ = blocks.shape

    def read() -> np.ndarray:
        return dequantize_mxfp4_numpy(blocks.read(), scales.read()).swapaxes(-1, -2).astype(dtype)

    def parts(row: TensorMapping, shapes: Sequence[Shape], lead: int) -> list[Any]:
        row = dataclasses.replace(row, transposed=not row.transposed)  # packed they are (out, in)
        whole = blocks.read().view(np.dtype((np.void, _BLOCK_BYTES)))[
            ..., 0
        ]  # a block is one element: a matrix as any other
        both = row.views(whole, shapes, lead), row.views(scales.read(), shapes, lead)
        return [_PackedView(*pair) for pair in zip(*both, strict=True)]

    def forget() -> None:
        blocks.release()
        scales.release()

    return LazyTensor(dtype, (*front, blocks_of_a_row * BLOCK_SIZE, out), read, forget, views=parts)


@dataclasses.dataclass(frozen=True)
class _PackedView:
    """What is read of an array, for one whose numbers, float32, are decoded when it is indexed."""

    blocks: np.ndarray
    """16 bytes an element."""
    scales: np.ndarray

    def reshape(self, shape: Shape) -> "_PackedView":
        shape = (*shape[:-1], shape[-1] // BLOCK_SIZE)
        return _PackedView(self.blocks.reshape(shape), self.scales.reshape(shape))

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """With a slice, of step 1 and with both ends, for each dim."""
        *rows, columns = index
        first = columns.start // BLOCK_SIZE
        held = (*rows, slice(first, -(-columns.stop // BLOCK_SIZE)))
        blocks = np.ascontiguousarray(self.blocks[held])[..., None].view(np.uint8)
        numbers = dequantize_mxfp4_numpy(blocks, self.scales[held])
        return numbers[..., columns.start - first * BLOCK_SIZE : columns.stop - first * BLOCK_SIZE]
