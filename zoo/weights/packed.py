"""Checkpoints whose matrices are packed as MXFP4, read as if they were not: piece by piece, as they are asked for."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zoo.models.facts import Row, Shape
from zoo.ops.mxfp4 import BLOCK, decode_on_host

from .tensors import CheckpointError, Tensor

BLOCKS, SCALES = "_blocks", "_scales"
BYTES = BLOCK // 2


def unpacked(tensors: Mapping[str, Tensor], place: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint, with `NAME` in place of `NAME_blocks` (experts, out, in / 32, 16) and `NAME_scales`
    (experts, out, in / 32): shaped (experts, in, out) as transformers has it in memory, and in the dtype of the bias
    beside it, or else of the largest tensor that is not packed.

    **Raises** `CheckpointError` for blocks without scales or scales without blocks, and for shapes or dtypes that do
    not go together.
    """
    names = [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]
    if wrong := [*faults(tensors, names)]:
        raise CheckpointError(f"{place} has tensors that are no MXFP4: " + "; ".join(sorted(wrong)[:8]))
    rest = {name: x for name, x in tensors.items() if not name.endswith((BLOCKS, SCALES))}
    floating = [x for x in rest.values() if jnp.issubdtype(x.dtype, jnp.floating)]
    usual = max(floating, key=lambda x: math.prod(x.shape)).dtype if floating else np.dtype(jnp.bfloat16)

    def dtype_of(name: str) -> np.dtype:
        beside = tensors.get(f"{name}_bias")
        return beside.dtype if beside in floating else usual

    return rest | {name: decoding(tensors[name + BLOCKS], tensors[name + SCALES], dtype_of(name)) for name in names}


def faults(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Iterator[str]:
    for name in tensors:
        if name.endswith(SCALES) and name.removesuffix(SCALES) not in names:
            yield f"{name} has no {name.removesuffix(SCALES)}{BLOCKS} beside it"
    for name in names:
        if name + SCALES not in tensors:
            yield f"{name}{BLOCKS} has no {name}{SCALES} beside it"
            continue
        blocks, scales = tensors[name + BLOCKS], tensors[name + SCALES]
        fit = blocks.shape[-1:] == (BYTES,) and blocks.shape[:-1] == scales.shape and len(scales.shape) >= 2
        if not fit or {blocks.dtype, scales.dtype} != {np.dtype(np.uint8)}:
            yield (
                f"{name}{BLOCKS} is {blocks.dtype}{list(blocks.shape)} and {name}{SCALES} "
                f"{scales.dtype}{list(scales.shape)}, where uint8[..., N, {BYTES}] and uint8[..., N] were expected"
            )


def decoding(blocks: Tensor, scales: Tensor, dtype: np.dtype) -> Tensor:
    """A tensor whose numbers are decoded while it is read. One of its parts is indexed before that, so that no more is
    decoded than is asked for."""
    *front, out, blocks_of_a_row, _ = blocks.shape

    def read() -> np.ndarray:
        return decode_on_host(blocks.read(), scales.read()).swapaxes(-1, -2).astype(dtype)

    def parts(row: Row, shapes: Sequence[Shape], lead: int) -> list[Any]:
        row = dataclasses.replace(row, transposed=not row.transposed)  # packed they are (out, in)
        whole = blocks.read().view(np.dtype((np.void, BYTES)))[..., 0]  # a block is one element: a matrix as any other
        both = row.views(whole, shapes, lead), row.views(scales.read(), shapes, lead)
        return [Undecoded(*pair) for pair in zip(*both, strict=True)]

    def forget() -> None:
        blocks.forget()
        scales.forget()

    return Tensor(dtype, (*front, blocks_of_a_row * BLOCK, out), read, forget, parts=parts)


@dataclasses.dataclass(frozen=True)
class Undecoded:
    """What is read of an array, for one whose numbers, float32, are decoded when it is indexed."""

    blocks: np.ndarray
    """16 bytes an element."""
    scales: np.ndarray

    def reshape(self, shape: Shape) -> "Undecoded":
        shape = (*shape[:-1], shape[-1] // BLOCK)
        return Undecoded(self.blocks.reshape(shape), self.scales.reshape(shape))

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """With a slice, of step 1 and with both ends, for each dim."""
        *rows, columns = index
        first = columns.start // BLOCK
        held = (*rows, slice(first, -(-columns.stop // BLOCK)))
        blocks = np.ascontiguousarray(self.blocks[held])[..., None].view(np.uint8)
        numbers = decode_on_host(blocks, self.scales[held])
        return numbers[..., columns.start - first * BLOCK : columns.stop - first * BLOCK]
