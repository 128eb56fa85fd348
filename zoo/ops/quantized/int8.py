"""Matrices of whole numbers of eight bits, with a scale a row (Dettmers et al., arXiv:2208.07339, section 2.1).

    W[o, i] = scale[o] code[o, i]        code a whole number from -127 to 127, scale[o] = max |W[o, :]| / 127

The paper calls it vector-wise. A row is one output's weights, over all inputs, so that the scale may also be multiplied
after the sum. 8 bits a number, and 32 a row.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

_MAX_CODE = 127

_Codes = Int8[Array, "*rows values"]
_Scales = Float[Array, "*rows"]


def dequantize_int8(codes: _Codes, scales: _Scales, dtype: Any = jnp.float32) -> Float[Array, "*rows values"]:
    """The numbers: multiplied in float32, and rounded to `dtype`."""
    return (codes.astype(jnp.float32) * scales[..., None]).astype(dtype)


def quantize_int8(x: Float[Array, "*rows values"]) -> tuple[_Codes, _Scales]:
    """Codes and scales, float32, of rows of numbers. Each becomes the nearest: none is off by more than half a scale,
    1/254 of its row's largest magnitude. Zeros stay zeros. A row with a number that is not finite becomes not a number
    as a whole."""
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(axis=-1)
    scales = jnp.where(jnp.isfinite(largest), largest / _MAX_CODE, jnp.nan)
    codes = jnp.round(x / jnp.where(scales == 0, 1, scales)[..., None])
    return jnp.clip(codes, -_MAX_CODE, _MAX_CODE).astype(jnp.int8), scales
