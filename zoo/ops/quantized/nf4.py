"""NF4: numbers of four bits in blocks of 64, for weights that are normally distributed (QLoRA, Dettmers et al.,
arXiv:2305.14314, section 3).

    x = constant BOOK[code]        constant = max |x| of the block, code from 0 to 15

The 16 values of the book are quantiles of a normal distribution between -1 and 1, zero among them (appendix E). Blocks
lie along the last dim; two codes are a byte, the earlier number in the low half.

A block's constant takes eight bits itself, as in the paper's double quantization, by a float32 offset and step that a
whole row shares:

    constant = offset + step number        offset the least of the row, step 1/255 of the distance to its largest

The paper takes 256 constants together, in the order in which they lie in memory, and so across rows. Here a row never
shares anything with another, and what a row shares it has whole: a matrix lies on a mesh by its own dims alone, and no
group is ever cut. Constants cost 8 / 64 + 64 / n bits a number in rows of n, where the paper has 0.127: 0.141 for 4,096
inputs, and 4.141 bits a number in all.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

BLOCK_SIZE = 64
"""How many numbers share a constant."""
CODEBOOK = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
"""What each code stands for: the paper's table."""
_CONSTANT_LEVELS = 255

_Codes = UInt8[Array, "*rows blocks 32"]
_Constants = UInt8[Array, "*rows blocks"]
_RowScalars = Float[Array, "*rows"]


def dequantize_nf4(
    codes: _Codes, constants: _Constants, offset: _RowScalars, step: _RowScalars, dtype: Any = jnp.float32
) -> Float[Array, "*rows values"]:
    """The numbers, 64 for each block: multiplied in float32, and rounded to `dtype`."""
    both = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], BLOCK_SIZE)
    numbers = _lookup_codebook(both) * _dequantize_constants(constants, offset, step)[..., None]
    return numbers.astype(dtype).reshape(*codes.shape[:-2], -1)


def _dequantize_constants(
    constants: _Constants, offset: _RowScalars, step: _RowScalars
) -> Float[Array, "*rows blocks"]:
    """What each block's values are multiplied with."""
    return offset[..., None] + step[..., None] * constants.astype(jnp.float32)


def _lookup_codebook(codes: UInt8[Array, "*dims"]) -> Float[Array, "*dims"]:
    """The value of each code. Its bits choose half of the book, a quarter, an eighth, one: a few operations a number on
    any backend, that fuse with what reads them, where a table would be looked up one number after another."""
    values = [jnp.float32(value) for value in CODEBOOK]
    for bit in range(4):
        is_set = (codes >> bit) & 1 == 1
        values = [jnp.where(is_set, odd, even) for even, odd in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def quantize_nf4(x: Float[Array, "*rows values"]) -> tuple[_Codes, _Constants, _RowScalars, _RowScalars]:
    """Codes, constants, offset and step of rows of numbers whose length is a multiple of 64.

    Each number becomes the nearest that its block's constant, as it is rounded, can give. A constant is off by at most
    step / 2. What lies between those furthest apart in the book, -1 and -0.696, is off by 0.152 constants at most, and
    what lies beyond a constant that was rounded down by no more than that was: a number is never off by more than
    0.152 of its block's largest and 1 / 510 of its row's. Zeros stay zeros. A row with a number that is not finite
    becomes not a number as a whole.

    **Raises** `ValueError` where 64 does not divide the last dim: a smaller block at the end of a row could not lie on
    a mesh as the others do.
    """
    if x.shape[-1] % BLOCK_SIZE:
        raise ValueError(
            f"NF4 has blocks of {BLOCK_SIZE}, and {x.shape[-1]} numbers are no whole number of blocks: take int8"
        )
    x = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK_SIZE)
    largest = jnp.abs(x).max(axis=-1)
    offset, top = largest.min(axis=-1), largest.max(axis=-1)
    offset = jnp.where(jnp.isfinite(top), offset, jnp.nan)
    step = (top - offset) / _CONSTANT_LEVELS
    distances = (largest - offset[..., None]) / jnp.where(step == 0, 1, step)[..., None]
    constants = jnp.clip(jnp.round(distances), 0, _CONSTANT_LEVELS).astype(jnp.uint8)
    scale = _dequantize_constants(constants, offset, step)[..., None]
    codes = _nearest_nf4_code(x / jnp.where(scale == 0, 1, scale))
    return codes[..., 0::2] | (codes[..., 1::2] << 4), constants, offset, step


def _nearest_nf4_code(values: Float[Array, "*dims"]) -> UInt8[Array, "*dims"]:
    """The place in the book of what each is nearest to."""
    middles = (CODEBOOK[:-1] + CODEBOOK[1:]) / 2
    return sum((jnp.uint8(values > middle) for middle in middles), start=jnp.zeros(values.shape, jnp.uint8))
