"""NF4 (NormalFloat): 4-bit quantization in blocks of 64 for normally distributed weights (QLoRA, Dettmers et al.,
arXiv:2305.14314, section 3).

    x = constant CODEBOOK[code]        constant = max |x| of the block, code from 0 to 15

The 16 values of the codebook are quantiles of a normal distribution, scaled to [-1, 1] and including zero (appendix E).
Blocks run along the last dim; a byte holds two codes, the earlier one in the low nibble.

Block constants are quantized to eight bits, as in the paper's double quantization, with a float32 offset and step per
row:

    constant = offset + step code        offset = min over the row, step = (max - min) / 255

The paper groups 256 constants in memory order, and so across rows. Here groups are rows, so that a sharded matrix never
splits a group. Constants cost 8 / 64 + 64 / n bits per value in rows of n, where the paper has 0.127: 0.141 for 4,096
inputs, and 4.141 bits per value in all.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

BLOCK_SIZE = 64
"""Number of values that share a constant."""
CODEBOOK = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
"""Value of each code, from the paper."""
_CONSTANT_LEVELS = 255

_Codes = UInt8[Array, "*rows blocks 32"]
_Constants = UInt8[Array, "*rows blocks"]
_RowScalars = Float[Array, "*rows"]


def dequantize_nf4(
    codes: _Codes, constants: _Constants, offset: _RowScalars, step: _RowScalars, dtype: Any = jnp.float32
) -> Float[Array, "*rows values"]:
    """Dequantize blocks of 64 values: multiply in float32, and round to `dtype`."""
    unpacked = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], BLOCK_SIZE)
    values = lookup_codebook(unpacked) * _dequantize_constants(constants, offset, step)[..., None]
    return values.astype(dtype).reshape(*codes.shape[:-2], -1)


def _dequantize_constants(
    constants: _Constants, offset: _RowScalars, step: _RowScalars
) -> Float[Array, "*rows blocks"]:
    """Dequantize the constants of all blocks."""
    return offset[..., None] + step[..., None] * constants.astype(jnp.float32)


def lookup_codebook(codes: UInt8[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Look up each code by a binary tree of selects over its bits.

    This takes a few elementwise operations per value on any backend, and fuses into its consumers; a gather would not.
    """
    values = [jnp.float32(value) for value in CODEBOOK]
    for bit in range(4):
        is_set = (codes >> bit) & 1 == 1
        values = [jnp.where(is_set, odd, even) for even, odd in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def quantize_nf4(x: Float[Array, "*rows values"]) -> tuple[_Codes, _Constants, _RowScalars, _RowScalars]:
    """Quantize rows to NF4: codes, constants, and the offset and step of each row.

    Each value rounds to the nearest multiple of its block's quantized constant. The error of a constant is at most
    step / 2, and half the widest gap of the codebook, from -1 to -0.696, is 0.152 constants: the error of a value is at
    most 0.152 of its block's largest plus 1 / 510 of its row's. Zeros stay zeros. A row with a value that is not finite
    becomes NaN.

    **Raises** `ValueError` if 64 does not divide the last dim: a shorter block at the end of a row could not be
    sharded.
    """
    if x.shape[-1] % BLOCK_SIZE:
        raise ValueError(
            f"NF4 has blocks of {BLOCK_SIZE}, and {x.shape[-1]} numbers are not a whole number of blocks: take int8"
        )
    x = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK_SIZE)
    largest = jnp.abs(x).max(axis=-1)
    offset = largest.min(axis=-1)
    top = largest.max(axis=-1)
    offset = jnp.where(jnp.isfinite(top), offset, jnp.nan)
    step = (top - offset) / _CONSTANT_LEVELS
    scaled = (largest - offset[..., None]) / jnp.where(step == 0, 1, step)[..., None]
    constants = jnp.clip(jnp.round(scaled), 0, _CONSTANT_LEVELS).astype(jnp.uint8)
    scale = _dequantize_constants(constants, offset, step)[..., None]
    codes = _nearest_nf4_code(x / jnp.where(scale == 0, 1, scale))
    return codes[..., 0::2] | (codes[..., 1::2] << 4), constants, offset, step


def _nearest_nf4_code(values: Float[Array, "*dims"]) -> UInt8[Array, "*dims"]:
    """Return the code of the nearest value in the codebook."""
    middles = (CODEBOOK[:-1] + CODEBOOK[1:]) / 2
    return sum((jnp.uint8(values > middle) for middle in middles), start=jnp.zeros(values.shape, jnp.uint8))
