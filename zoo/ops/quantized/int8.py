"""Int8 quantization of matrices with one scale per row (Dettmers et al., arXiv:2208.07339, section 2.1).

    W[o, i] = scale[o] code[o, i]        code an integer from -127 to 127, scale[o] = max |W[o, :]| / 127

The paper calls it vector-wise. A row holds one output's weights for all inputs, so the scale may also be applied after
the sum. 8 bits per weight, and 32 per row.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

_MAX_CODE = 127

_Codes = Int8[Array, "*rows values"]
_Scales = Float[Array, "*rows"]


def dequantize_int8(codes: _Codes, scales: _Scales, dtype: Any = jnp.float32) -> Float[Array, "*rows values"]:
    """Dequantize: multiply codes by scales in float32, and round to `dtype`."""
    return (codes.astype(jnp.float32) * scales[..., None]).astype(dtype)


def quantize_int8(x: Float[Array, "*rows values"]) -> tuple[_Codes, _Scales]:
    """Quantize rows to int8 codes and float32 scales, rounding to nearest.

    The error is at most half a scale, 1/254 of the row's largest magnitude. Zeros stay zeros. A row with a value that
    is not finite becomes NaN.
    """
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(axis=-1)
    scales = jnp.where(jnp.isfinite(largest), largest / _MAX_CODE, jnp.nan)
    codes = jnp.round(x / jnp.where(scales == 0, 1, scales)[..., None])
    return jnp.clip(codes, -_MAX_CODE, _MAX_CODE).astype(jnp.int8), scales
