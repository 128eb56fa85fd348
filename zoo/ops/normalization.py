"""RMSNorm and LayerNorm over the last dim, computed in float32 for any input dtype, and reductions of a softmax.

Like PyTorch's layer_norm and rms_norm, Gemma and OLMo 2, these multiply by the weight in float32 and round once. Llama
and most of its descendants round the normalized value to the input's dtype and then multiply, which rounds twice. The
two are equal in float32 and differ by one rounding in bfloat16.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .platform import current_platform

mean_last_dim = partial(jnp.mean, axis=-1, keepdims=True)
_MIN_SPLIT_SIZE = 32
"""Size from which XLA's CPU backend splits a reduction."""
_MAX_HALVINGS = 3
"""Halvings before the reduction; each doubles the code of the loop."""


def rms_norm(
    x: Float[Array, "*dims features"],
    weight: Float[Array, "... features"] | None = None,
    *,
    epsilon: float,
    offset: float = 0.0,
    mean: Callable = mean_last_dim,
) -> Float[Array, "*dims features"]:
    """Apply RMSNorm: y = x / sqrt(mean(x^2) + epsilon) * (offset + weight).

    `weight` is one scale per feature, or anything that broadcasts against `x`, such as `"heads head_dim"`; None scales
    nothing. `offset=1.0` is Gemma's, whose weights are stored minus one. `mean` averages over the last dim and keeps
    it; for sharded features pass one that averages over all shards. The result has the dtype of `x`. Source: Zhang and
    Sennrich, arXiv 1910.07467, equation 4.
    """
    x_fp32 = x.astype(jnp.float32)
    y = x_fp32 * lax.rsqrt(mean(x_fp32 * x_fp32) + epsilon)
    if weight is not None:
        y = y * (offset + weight.astype(jnp.float32))
    return y.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*dims features"],
    weight: Float[Array, "... features"] | None = None,
    bias: Float[Array, "... features"] | None = None,
    *,
    epsilon: float,
    offset: float = 0.0,
    mean: Callable = mean_last_dim,
) -> Float[Array, "*dims features"]:
    """Apply LayerNorm: y = (x - mean(x)) / sqrt(var(x) + epsilon) * (offset + weight) + bias.

    The variance is the biased one, divided by the number of features. `weight` and `bias` have one value per feature,
    or broadcast against `x`; both are optional. `offset=1.0` is Nemotron's, whose weights are stored minus one. `mean`
    is as for `rms_norm`. The result has the dtype of `x`. Source: Ba, Kiros and Hinton, arXiv 1607.06450, section 3.
    """
    x_fp32 = x.astype(jnp.float32)
    centered = x_fp32 - mean(x_fp32)
    y = centered * lax.rsqrt(mean(centered * centered) + epsilon)
    if weight is not None:
        y = y * (offset + weight.astype(jnp.float32))
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def max_last_dim(x: Float[Array, "*dims features"], *, halvings: int = _MAX_HALVINGS) -> Float[Array, "*dims 1"]:
    """Compute the maximum over the last dim and keep it.

    On a CPU, halves are compared elementwise first, in vector registers: XLA reduces the last dim one number at a time.
    """
    return _halve_last_dim(x, jnp.maximum, halvings, may_overlap=True).max(-1, keepdims=True)


def sum_last_dim(x: Float[Array, "*dims features"], *, halvings: int = _MAX_HALVINGS) -> Float[Array, "*dims 1"]:
    """Compute the sum over the last dim and keep it; on a CPU of halves first, as `max_last_dim` does."""
    return _halve_last_dim(x, jnp.add, halvings, may_overlap=False).sum(-1, keepdims=True)


def _halve_last_dim(
    x: Float[Array, "*dims features"], combine: Callable[[Array, Array], Array], halvings: int, *, may_overlap: bool
) -> Float[Array, "*dims fewer"]:
    """Combine both halves of a long last dim on a CPU, again and again. Halves of an odd size overlap in the middle."""
    if current_platform() != "cpu":
        return x
    for _ in range(halvings):
        if x.shape[-1] <= _MIN_SPLIT_SIZE or (x.shape[-1] % 2 and not may_overlap):
            break
        half = -(-x.shape[-1] // 2)
        x = combine(x[..., :half], x[..., -half:])
    return x
