"""The pointwise nonlinearities that configs name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x Phi(x) with the exact normal distribution function (Hendrycks and Gimpel, arXiv 1606.08415, section 2)."""
    return jax.nn.gelu(x, approximate=False)


def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): the approximation in the same section, which GPT-2 uses."""
    return jax.nn.gelu(x, approximate=True)


def relu_squared(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """max(x, 0)^2 (So et al., Primer, arXiv 2109.08668, section 4)."""
    return jax.nn.relu(x) ** 2


def clamped_swiglu(
    gate: Float[Array, "..."], up: Float[Array, "..."], *, alpha: float | int = 1.702, limit: float | int = 7.0
) -> Float[Array, "..."]:
    """(clip(up, -limit, limit) + 1) * g sigmoid(alpha g) with g = min(gate, limit) (GPT-OSS, arXiv 2508.10925, section
    2.2; its code). With alpha 1.702 the gate is nearly a gelu (arXiv 1606.08415, section 2). Where a value is clipped
    it gets no gradient."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {"gelu": gelu, "gelu_tanh": gelu_tanh, "relu": jax.nn.relu, "relu_squared": relu_squared, "silu": jax.nn.silu}
)


def get_activation(name: str) -> Callable[[Array], Array]:
    """The function that `ACTIVATIONS` has under `name`.

    **Raises** `ValueError` for a name that is not there, with those that are.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"There is no activation {name!r}. Known are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]
