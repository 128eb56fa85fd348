"""Activation functions, by the names that configs use."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .normalization import mean_last_dim


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute exact GELU, x Phi(x) with Phi the normal distribution function (Hendrycks and Gimpel, arXiv 1606.08415,
    section 2)."""
    return 0.5 * x * _erfc(-x * np.sqrt(0.5).astype(x.dtype))


@jax.custom_jvp
def _erfc(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute 1 - erf(x). Its derivative is that of `lax.erfc`, which JAX 0.12 cannot compute inside `shard_map`."""
    return lax.erfc(x)


@_erfc.defjvp
def _erfc_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    slope = np.asarray(-2 / np.sqrt(np.pi)).astype(x.dtype)
    return _erfc(x), tangent * (slope * jnp.exp(-jnp.square(x)))


def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute GPT-2's tanh approximation of GELU, x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (arXiv 1606.08415,
    section 2)."""
    return jax.nn.gelu(x, approximate=True)


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute CLIP's approximation of GELU, x sigmoid(1.702 x) (arXiv 1606.08415, section 2)."""
    return x * jax.nn.sigmoid(1.702 * x)


def relu_squared(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute ReLU^2, max(x, 0)^2 (So et al., Primer, arXiv 2109.08668, section 4)."""
    return jax.nn.relu(x) ** 2


def clamped_swiglu(
    gate: Float[Array, "..."],
    up: Float[Array, "..."],
    *,
    alpha: float | int = 1.702,
    limit: float | int = 7.0,
    offset: float | int = 1.0,
) -> Float[Array, "..."]:
    """Compute clamped SwiGLU: (clip(up, -limit, limit) + offset) * g sigmoid(alpha g) with g = min(gate, limit).

    With alpha 1.702 the gate is nearly a GELU (arXiv 1606.08415, section 2). Clipped values get no gradient. Source:
    GPT-OSS, arXiv 2508.10925, section 2.2, and its code; with alpha 1 and offset 0 DeepSeek-V4, 2026.
    """
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return (up + offset) * gate * jax.nn.sigmoid(alpha * gate)


def gaussian_top_k(
    x: Float[Array, "*dims features"], sparsity: float, *, mean: Callable = mean_last_dim
) -> Float[Array, "*dims features"]:
    """Subtract a cutoff and set features below it to 0: max(x - mean(x) - quantile std(x), 0), in float32.

    The quantile is the standard normal distribution's at `sparsity`, between 0 and 1: about this fraction of normally
    distributed features becomes 0, without sorting them. `mean` averages over the last dim and keeps it, as for
    `zoo.ops.normalization.rms_norm`. Source: statistical top-k of the Spark Transformer (You et al., arXiv 2506.06644,
    section 3), as Gemma 3n has it.
    """
    from statistics import NormalDist  # here, since one family needs it, and it would be 3% of `import zoo`

    x_fp32 = x.astype(jnp.float32)
    centered = x_fp32 - mean(x_fp32)
    variance = mean(centered * centered)
    is_constant = variance == 0  # where a square root has no gradient
    deviation = jnp.where(is_constant, 0, jnp.sqrt(jnp.where(is_constant, 1, variance)))
    return jax.nn.relu(centered - NormalDist().inv_cdf(sparsity) * deviation).astype(x.dtype)


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "gelu": gelu,
        "gelu_tanh": gelu_tanh,
        "quick_gelu": quick_gelu,
        "relu": jax.nn.relu,
        "relu_squared": relu_squared,
        "silu": jax.nn.silu,
    }
)
