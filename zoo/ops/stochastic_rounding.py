"""Stochastic rounding to a narrower float format: up or down with probabilities that make the expectation exact.

    y = q floor(x / q + u),    u uniform in [0, 1),    q = 2^(max(exponent(x), emin) - mantissa bits)

q is the spacing of the format at x, so that E[y] = x, and a value that the format holds stays as it is (Gupta et al.,
arXiv:1502.02551, section 3). Sums of many small terms then grow, on average, as in exact arithmetic. Rounded to
nearest, a term below half the spacing is lost every time.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, UInt32

_NOISE_BITS = 16
"""Random bits per value: x / q + u then fits the 24 bits of a float32 for formats of up to 8 significant bits."""


def stochastic_round(x: Float[Array, "*dims"], bits: UInt32[Array, "*dims"], dtype: Any) -> Float[Array, "*dims"]:
    """Round float32 values to `dtype`, any float format of at most 8 significant bits: bfloat16, FP8, FP4.

    - `bits`: uniform random bits, of which 16 per value are used: the expectation is exact to 2^-16 of the spacing.

    Infinities and NaN stay as they are where the format has them. Values beyond the largest of the format saturate in
    FP8 and FP4, and become infinite in bfloat16, as rounded to nearest.

    **Raises** `ValueError` for a dtype with more significant bits.
    """
    info = jnp.finfo(dtype)
    if info.nmant + 1 > 24 - _NOISE_BITS:
        raise ValueError(
            f"{jnp.dtype(dtype).name} has {info.nmant + 1} significant bits, and 8 or fewer can be rounded"
        )
    x = x.astype(jnp.float32)
    if jnp.dtype(dtype) == jnp.bfloat16:
        return _round_to_bfloat16(x, bits)
    return _round_by_spacing(x, bits, dtype)


def _round_to_bfloat16(x: Float[Array, "*dims"], bits: UInt32[Array, "*dims"]) -> BFloat16[Array, "*dims"]:
    """Add the random bits to the 16 that a bfloat16 lacks, and cut these off: the numbers of `_round_by_spacing` in a
    few integer operations. The floor there rounds negative values away from zero, so their noise is inverted."""
    word = lax.bitcast_convert_type(x, jnp.uint32)
    noise = bits >> (32 - _NOISE_BITS)
    noise = jnp.where(x < 0, 0xFFFF - noise, noise)
    y = lax.bitcast_convert_type(((word + noise) >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), y, x.astype(jnp.bfloat16))


def _round_by_spacing(x: Float[Array, "*dims"], bits: UInt32[Array, "*dims"], dtype: Any) -> Float[Array, "*dims"]:
    """Compute the formula above, for any format of at most 8 significant bits."""
    info = jnp.finfo(dtype)
    _, exponent = jnp.frexp(x)  # x = m 2^exponent with 1/2 <= m < 1
    spacing_exponent = jnp.maximum(exponent - 1, int(info.minexp)) - info.nmant
    # Two exact steps: the spacing of a subnormal bfloat16 is itself subnormal, and its inverse not finite.
    scaled = jnp.ldexp(jnp.ldexp(x, -(spacing_exponent // 2)), -(spacing_exponent - spacing_exponent // 2))
    noise = (bits >> (32 - _NOISE_BITS)).astype(jnp.float32) * 2.0**-_NOISE_BITS
    rounded = jnp.floor(scaled + noise)
    y = jnp.ldexp(jnp.ldexp(rounded, spacing_exponent // 2), spacing_exponent - spacing_exponent // 2)
    y = jnp.where(jnp.isfinite(x), y, x)
    if jnp.dtype(dtype).itemsize == 1:
        y = jnp.where(jnp.isfinite(x), jnp.clip(y, -float(info.max), float(info.max)), x)
    return y.astype(dtype)
