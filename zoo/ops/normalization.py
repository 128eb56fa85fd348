"""Normalization over the last dim, computed in float32 whatever the input's dtype.

Where the result is rounded back differs between models. PyTorch's own layer_norm and rms_norm multiply by the weight in
float32 and round once; so do Gemma and OLMo 2, and so do we. Llama and most of its descendants round the normalized
value to the input's dtype first and multiply after, which rounds twice. In float32 the two are the same numbers; in
bfloat16 they differ by one rounding.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

mean_last_dim = partial(jnp.mean, axis=-1, keepdims=True)


def rms_norm(
    x: Float[Array, "*dims features"],
    weight: Float[Array, "... features"] | None = None,
    *,
    epsilon: float,
    offset: float = 0.0,
    mean: Callable = mean_last_dim,
) -> Float[Array, "*dims features"]:
    """Divide by the root of the mean square: y = x / sqrt(mean(x^2) + epsilon) * (offset + weight).

    `weight` is one scale a feature, or anything that broadcasts against `x`, such as `"heads head_dim"`; without one
    nothing is scaled. `offset=1.0` is Gemma's, whose weights are stored as the distance from one. `mean` takes the mean
    over the last dim and keeps it: of features that are a share of more, that of all of them. The result has the dtype
    of `x`. Source: Zhang and Sennrich, arXiv 1910.07467, equation 4.
    """
    wide = x.astype(jnp.float32)
    y = wide * lax.rsqrt(mean(wide * wide) + epsilon)
    if weight is not None:
        y = y * (offset + weight.astype(jnp.float32))
    return y.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*dims features"],
    weight: Float[Array, "... features"] | None = None,
    bias: Float[Array, "... features"] | None = None,
    *,
    epsilon: float,
    mean: Callable = mean_last_dim,
) -> Float[Array, "*dims features"]:
    """Subtract the mean, divide by the deviation: y = (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias.

    The variance divides by the number of features, not by one less. `weight` and `bias` are one number a feature, or
    anything that broadcasts against `x`; either may be missing. `mean` is that of `rms_norm`. The result has the dtype
    of `x`. Source: Ba, Kiros and Hinton, arXiv 1607.06450, section 3.
    """
    wide = x.astype(jnp.float32)
    centered = wide - mean(wide)
    y = centered * lax.rsqrt(mean(centered * centered) + epsilon)
    if weight is not None:
        y = y * weight.astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)
