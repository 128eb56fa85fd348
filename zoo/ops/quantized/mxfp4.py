"""MXFP4: numbers of four bits in blocks of 32, each block with a scale (OCP Microscaling Formats v1.0, section 5.3.3).

    x = (-1)^sign * magnitude * 2^(scale - 127)        magnitude one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (E2M1)

Blocks lie along the last dim. As GPT-OSS stores them (arXiv 2508.10925, section 2.1), 32 numbers are 16 bytes with the
earlier number of each pair in the low half, and beside them lies one byte of scale: 4.25 bits a number.

Every number has two significant bits, so that decoding is exact in float32 and in bfloat16 for scales from 2 to 252,
and in float16 for scales from 104 to 140. Larger scales overflow at their largest magnitudes, smaller ones are
subnormal, which XLA may take for zero. The scale 255 says that the whole block is not a number.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

BLOCK_SIZE = 32
"""How many numbers share a scale."""
NAN_SCALE = 255

_Blocks = UInt8[Array, "*rows blocks 16"]
_Scales = UInt8[Array, "*rows blocks"]

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_ALL_BYTES = np.arange(256)
_BYTE_VALUES = np.stack(
    [np.concatenate([_MAGNITUDES, -_MAGNITUDES])[half] for half in (_ALL_BYTES & 15, _ALL_BYTES >> 4)], axis=1
)
_SCALE_VALUES = np.append(np.exp2(_ALL_BYTES[:255] - 127.0), np.nan).astype(np.float32)
_ROUND_TIES_UP = (False, True) * 3 + (False,)
"""Of each two neighbors, whether what lies in the middle becomes the larger: the one whose code is even does."""


def dequantize_mxfp4(blocks: _Blocks, scales: _Scales, dtype: Any = jnp.float32) -> Float[Array, "*rows values"]:
    """The numbers, 32 for each block. No table is looked up: two halves of a byte are shifted to where float32 has
    exponent and mantissa, which costs a few operations a number on any backend, and fuses with what reads them."""
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], BLOCK_SIZE).astype(jnp.uint32)
    exponent_and_mantissa = codes & 7
    # E2M1 counts its exponent from 1 and float32 from 127; 0 and 0.5 have no leading one, which float32 cannot say.
    magnitudes = lax.bitcast_convert_type((exponent_and_mantissa + (126 << 1)) << 22, jnp.float32)
    magnitudes = jnp.where(exponent_and_mantissa < 2, exponent_and_mantissa.astype(jnp.float32) / 2, magnitudes)
    powers = lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    powers = jnp.where(scales == NAN_SCALE, jnp.nan, powers)
    numbers = jnp.where(codes > 7, -magnitudes, magnitudes) * powers[..., None]
    return numbers.astype(dtype).reshape(*blocks.shape[:-2], -1)


def dequantize_mxfp4_numpy(
    blocks: UInt8[np.ndarray, "*rows blocks 16"], scales: UInt8[np.ndarray, "*rows blocks"]
) -> Float[np.ndarray, "*rows values"]:
    """The same for numpy's arrays, in float32: from a table of what each byte holds."""
    numbers = np.take(_BYTE_VALUES.view(np.uint64)[:, 0], blocks).view(np.float32)
    with np.errstate(over="ignore"):
        numbers *= _SCALE_VALUES[scales][..., None]
    return numbers.reshape(*blocks.shape[:-2], -1)


def quantize_mxfp4(x: Float[Array, "*rows values"]) -> tuple[_Blocks, _Scales]:
    """Blocks and scales of numbers whose last dim is a multiple of 32.

    A block's scale is that of section 6.3 of the specification: 2^(floor(log2 of its largest magnitude) - 2), so that
    the largest lies between 4 and 8 of them; what is above 6 becomes 6. Every other number goes to the nearest, and to
    the even code from the middle between two: no number is off by more than a quarter of its block's largest. What was
    decoded is encoded without loss. A block with a number that is not finite becomes not a number as a whole.

    **Raises** `ValueError` where 32 does not divide the last dim.
    """
    if x.shape[-1] % BLOCK_SIZE:
        raise ValueError(f"MXFP4 has blocks of {BLOCK_SIZE}, and {x.shape[-1]} numbers are no whole number of blocks")
    x = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK_SIZE)
    largest = jnp.abs(x).max(axis=-1)
    exponent_of = lambda magnitude: (lax.bitcast_convert_type(magnitude, jnp.uint32) >> 23).astype(jnp.int32)
    scales = jnp.maximum(exponent_of(largest) - 2, 0)
    powers = lax.bitcast_convert_type((254 - scales).astype(jnp.uint32) << 23, jnp.float32)
    scales = jnp.where(jnp.isfinite(largest), scales, NAN_SCALE).astype(jnp.uint8)
    codes = _nearest_e2m1_code(jnp.abs(x) * powers[..., None]) | (jnp.signbit(x).astype(jnp.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def _nearest_e2m1_code(magnitudes: Float[Array, "*dims"]) -> UInt8[Array, "*dims"]:
    """The three bits of the magnitude that each is nearest to."""
    middles = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2
    above = [
        magnitudes >= middle if up else magnitudes > middle for middle, up in zip(middles, _ROUND_TIES_UP, strict=True)
    ]
    return jnp.stack(above).sum(0, dtype=jnp.uint8)
