"""MXFP8 recipe: E4M3 values with a power of two per 32 of them (OCP Microscaling Formats v1.0)."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt32

from .blocks import make_tile, quantize_blocks
from .fp8 import ScaledTensor
from .recipe import AbstractRecipe

BLOCK_SIZE = 32
"""Number of values that share a scale."""
_LARGEST_EXPONENT = 8
"""Exponent of the largest value of E4M3, 448 = 1.75 * 2^8."""


@dataclasses.dataclass(frozen=True)
class MXFP8(AbstractRecipe):
    """FP8 with an E8M0 scale, a power of two, per 32 values along the contracted dim of each product, all in E4M3 (OCP
    Microscaling Formats v1.0, sections 5.2 and 6.3; recipes for training: Mishra et al., arXiv:2506.08027).

        scale = 2^(floor(log2 max |x|) - 8)

    Values above 448 scales saturate. Tiles of tokens, for dW, are within a row of the batch. Scales below 2^-126 are
    2^-126, since processors flush smaller ones to zero.
    """

    @property
    def block_size(self) -> int:
        return BLOCK_SIZE

    def measure(self, x: Float[Array, "*dims"], axes: Sequence[str]) -> None:
        """Return None: no scale is for a whole tensor."""

    def quantize_input(self, x: Float[Array, "*rows in"], amax: Float[Array, "..."] | None, axis: int) -> ScaledTensor:
        return quantize_blocks(x, make_tile(x.ndim, axis, BLOCK_SIZE), find_power_of_two)

    def quantize_weight(
        self, weight: Float[Array, "*experts rows columns"], amax: Float[Array, "..."] | None, axis: int
    ) -> ScaledTensor:
        return self.quantize_input(weight, amax, axis)

    def quantize_gradient(
        self,
        gradient: Float[Array, "*rows out"],
        amax: Float[Array, "..."] | None,
        axis: int,
        bits: UInt32[Array, "*padded out"] | None,
    ) -> ScaledTensor:
        return self.quantize_input(gradient, amax, axis)


def find_power_of_two(amax: Float[Array, "*blocks"]) -> tuple[Float[Array, "*blocks"], Shaped[Array, "*blocks"]]:
    """Return the multipliers of blocks with these maxima, and their scales in E8M0."""
    exponent = (lax.bitcast_convert_type(amax, jnp.int32) >> 23) - 127 - _LARGEST_EXPONENT
    exponent = jnp.where(amax > 0, jnp.clip(exponent, -126, 126), 0)
    multiplier = lax.bitcast_convert_type((127 - exponent) << 23, jnp.float32)
    return multiplier, lax.bitcast_convert_type((exponent + 127).astype(jnp.uint8), jnp.float8_e8m0fnu)
