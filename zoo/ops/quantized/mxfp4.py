"""MXFP4: 4-bit floats in blocks of 32 that share a scale (OCP Microscaling Formats v1.0, section 5.3.3).

    x = (-1)^sign * magnitude * 2^(scale - 127)        magnitude one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (E2M1)

Blocks run along the last dim. As GPT-OSS stores them (arXiv 2508.10925, section 2.1), 32 values are 16 bytes, with the
earlier value of each pair in the low nibble, and one byte of scale: 4.25 bits per value.

Values have two significant bits, so dequantization is exact in float32 and bfloat16 for scales from 2 to 252, and in
float16 for scales from 104 to 140. Larger scales overflow at their largest magnitudes; smaller ones are subnormal,
which XLA may flush to zero. The scale 255 encodes a block of NaN.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

BLOCK_SIZE = 32
"""Number of values that share a scale."""
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
"""For each two neighboring magnitudes, True if their midpoint rounds up: ties go to the even code."""


def dequantize_mxfp4(blocks: _Blocks, scales: _Scales, dtype: Any = jnp.float32) -> Float[Array, "*rows values"]:
    """Dequantize blocks of 32 values by shifting their bits into the exponent and mantissa of float32.

    This takes a few elementwise operations per value on any backend, and fuses into its consumers; a table would not.
    """
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], BLOCK_SIZE).astype(jnp.uint32)
    exponent_and_mantissa = codes & 7
    # The exponent bias is 1 in E2M1 and 127 in float32; 0 and 0.5 are subnormal, with no counterpart in float32.
    magnitudes = lax.bitcast_convert_type((exponent_and_mantissa + (126 << 1)) << 22, jnp.float32)
    magnitudes = jnp.where(exponent_and_mantissa < 2, exponent_and_mantissa.astype(jnp.float32) / 2, magnitudes)
    powers = lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    powers = jnp.where(scales == NAN_SCALE, jnp.nan, powers)
    values = jnp.where(codes > 7, -magnitudes, magnitudes) * powers[..., None]
    return values.astype(dtype).reshape(*blocks.shape[:-2], -1)


def dequantize_mxfp4_numpy(
    blocks: UInt8[np.ndarray, "*rows blocks 16"], scales: UInt8[np.ndarray, "*rows blocks"]
) -> Float[np.ndarray, "*rows values"]:
    """Dequantize numpy arrays to float32, by a lookup table with the two values of each byte."""
    values = np.take(_BYTE_VALUES.view(np.uint64)[:, 0], blocks).view(np.float32)
    with np.errstate(over="ignore"):
        values *= _SCALE_VALUES[scales][..., None]
    return values.reshape(*blocks.shape[:-2], -1)


def quantize_mxfp4(x: Float[Array, "*rows values"]) -> tuple[_Blocks, _Scales]:
    """Quantize to MXFP4 blocks and scales, along a last dim that is a multiple of 32.

    The scale of a block is 2^(floor(log2 max |x|) - 2) (section 6.3 of the specification), so that its largest
    magnitude is between 4 and 8 scales; above 6 it saturates to 6. All others round to nearest, ties to even: the error
    is at most a quarter of the block's largest. Quantizing dequantized values is lossless. A block with a value that is
    not finite becomes NaN.

    **Raises** `ValueError` if 32 does not divide the last dim.
    """
    if x.shape[-1] % BLOCK_SIZE:
        raise ValueError(
            f"MXFP4 has blocks of {BLOCK_SIZE}, and {x.shape[-1]} numbers are not a whole number of blocks"
        )
    x = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK_SIZE)
    largest = jnp.abs(x).max(axis=-1)
    exponent_of = lambda magnitude: (lax.bitcast_convert_type(magnitude, jnp.uint32) >> 23).astype(jnp.int32)
    scales = jnp.maximum(exponent_of(largest) - 2, 0)
    powers = lax.bitcast_convert_type((254 - scales).astype(jnp.uint32) << 23, jnp.float32)
    scales = jnp.where(jnp.isfinite(largest), scales, NAN_SCALE).astype(jnp.uint8)
    codes = _nearest_e2m1_code(jnp.abs(x) * powers[..., None]) | (jnp.signbit(x).astype(jnp.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def _nearest_e2m1_code(magnitudes: Float[Array, "*dims"]) -> UInt8[Array, "*dims"]:
    """Return the three-bit code of the nearest magnitude."""
    middles = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2
    above = []
    for middle, rounds_up in zip(middles, _ROUND_TIES_UP, strict=True):
        is_above = magnitudes >= middle if rounds_up else magnitudes > middle
        above.append(is_above)
    return jnp.stack(above).sum(0, dtype=jnp.uint8)
