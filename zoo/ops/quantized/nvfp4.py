"""NVFP4 recipe: E2M1 values with an E4M3 scale per 16 of them, and a float32 scale per tensor."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8, UInt32

from ..stochastic_rounding import stochastic_round
from .blocks import find_block_amax, make_tile
from .fp8 import E4M3, ScaledTensor, expand_blocks, find_amax, find_multiplier, saturating_cast
from .hadamard import transform_tokens
from .recipe import AbstractRecipe

E2M1 = jnp.float4_e2m1fn
BLOCK_SIZE = 16
"""Number of values that share a scale."""
_LARGEST_VALUE, _LARGEST_SCALE = 6.0, 448.0


@dataclasses.dataclass(frozen=True)
class NVFP4(AbstractRecipe):
    """FP4 training with two levels of scales (NVIDIA, arXiv:2509.25149).

        x ~ q * s * t        t = max |x| / (6 * 448)        s = E4M3(max |block| / 6 / t)        q in E2M1

    Inputs and gradients have blocks of 16 along the contracted dim. Weights have blocks of 16 x 16, so that W and its
    transpose are rounded alike. Gradients are rounded stochastically, which needs a key: `zoo.value_and_grad(...)(...,
    key=key)`, and a loss that passes it on. Both operands of dW are transformed by a random Hadamard matrix of 16
    tokens. The paper keeps some layers, above all the last ones, in higher precision: choose `targets` accordingly.
    Experts have no keys, and are refused.
    """

    stochastic: bool = True
    """Round gradients stochastically, for which a step needs a PRNG key; else to nearest."""

    @property
    def block_size(self) -> int:
        return BLOCK_SIZE

    @property
    def rounds_stochastically(self) -> bool:
        return self.stochastic

    def quantize_input(self, x: Float[Array, "*rows in"], amax: Float[Array, "..."] | None, axis: int) -> ScaledTensor:
        if axis == -2:
            x, amax = _transform(x, amax)
        return quantize_nvfp4(x, amax, make_tile(x.ndim, axis, BLOCK_SIZE))

    def quantize_weight(
        self, weight: Float[Array, "*experts rows columns"], amax: Float[Array, "..."] | None, axis: int
    ) -> ScaledTensor:
        return quantize_nvfp4(weight, amax, (BLOCK_SIZE, BLOCK_SIZE))

    def quantize_gradient(
        self,
        gradient: Float[Array, "*rows out"],
        amax: Float[Array, "..."] | None,
        axis: int,
        bits: UInt32[Array, "*padded out"] | None,
    ) -> ScaledTensor:
        if axis == -2:
            gradient, amax = _transform(gradient, amax)
        if bits is not None:
            bits = bits[:, : gradient.shape[1]]
        return quantize_nvfp4(gradient, amax, make_tile(gradient.ndim, axis, BLOCK_SIZE), bits)


def _transform(x: Float[Array, "*rows in"], amax: Any) -> tuple[Float[Array, "*padded in"], Any]:
    """Transform blocks of 16 tokens. Their maximum grows by at most 4, the square root of 16, and the scale of the
    tensor allows for that, so that no second maximum over devices is needed."""
    return transform_tokens(x), 4 * amax


def quantize_nvfp4(
    x: Float[Array, "*dims"], amax: Any, block: tuple[int, ...], bits: UInt32[Array, "*dims"] | None = None
) -> ScaledTensor:
    """Quantize to E2M1, to nearest or stochastically with random `bits`. `amax` is a maximum of the tensor, or more. A
    block with a value that is not finite becomes NaN."""
    x = x.astype(jnp.float32)
    tensor = 1 / find_multiplier(amax, _LARGEST_VALUE * _LARGEST_SCALE)
    largest = find_block_amax(x, block)
    scales = saturating_cast(largest / _LARGEST_VALUE / tensor, E4M3)
    decoded = scales.astype(jnp.float32)
    inverse = jnp.where(decoded > 0, 1 / (jnp.where(decoded > 0, decoded, 1) * tensor), 0)
    scaled = x * expand_blocks(inverse, block, x.shape)
    if bits is not None:
        scaled = stochastic_round(scaled, bits, E2M1).astype(jnp.float32)
    return ScaledTensor(saturating_cast(scaled, E2M1), jnp.where(jnp.isfinite(amax), tensor, jnp.nan), scales, block)


def pack_nvfp4(
    weight: Float[Array, "out in"],
) -> tuple[UInt8[Array, "out codes"], UInt8[Array, "out blocks"], Float[Array, "1"]]:
    """Quantize a matrix along its inputs as files of compressed-tensors hold it: codes, constants and a global scale.

        W ~ code * E4M3(constant) / global_scale        global_scale = 6 * 448 / max |W|

    Two codes of E2M1 share a byte, the earlier input in the low nibble; a constant is the byte of the scale of 16
    inputs. A matrix with a value that is not finite becomes NaN.
    """
    amax = find_amax(weight)
    quantized = quantize_nvfp4(weight, amax, (1, BLOCK_SIZE))
    codes = lax.bitcast_convert_type(quantized.values, jnp.uint4).astype(jnp.uint8)
    assert quantized.block_scales is not None
    constants = lax.bitcast_convert_type(quantized.block_scales, jnp.uint8)
    multiplier = find_multiplier(amax, _LARGEST_VALUE * _LARGEST_SCALE)
    global_scale = jnp.where(jnp.isfinite(amax), multiplier, jnp.nan)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), constants, global_scale[None]
