"""Reductions over the last dim in the form that each platform computes fastest."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from .platform import current_platform

_MIN_SIZE = 32
"""Size from which XLA's CPU backend splits a reduction."""
_MAX_HALVINGS = 3
"""Halvings before the reduction; each doubles the code of the loop."""


def max_last_dim(x: Float[Array, "*dims features"]) -> Float[Array, "*dims 1"]:
    """Compute the maximum over the last dim and keep it.

    On a CPU, halves are compared elementwise first, in vector registers: XLA reduces the last dim one number at a time.
    """
    halvings = _MAX_HALVINGS if current_platform() == "cpu" else 0
    for _ in range(halvings):
        if x.shape[-1] <= _MIN_SIZE:
            break
        half = -(-x.shape[-1] // 2)  # of an odd size both have the middle
        x = jnp.maximum(x[..., :half], x[..., -half:])
    return x.max(-1, keepdims=True)
