"""FP8 recipe with one scale per block: tiles of inputs and gradients along the contracted dim, squares of weights."""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from .fp8 import E4M3, ScaledTensor, expand_blocks, find_multiplier, saturating_cast
from .recipe import AbstractRecipe


@dataclasses.dataclass(frozen=True)
class BlockScaling(AbstractRecipe):
    """FP8 with one scale per 1 x 128 tile of inputs and gradients, along the contracted dim of each product, and one
    per 128 x 128 block of weights: DeepSeek-V3 (arXiv:2412.19437, section 3.3).

    All operands are in E4M3: an outlier costs precision only within its tile. Tiles of tokens, for dW, are within a row
    of the batch. A last tile may be smaller.
    """

    size: int = 128
    """Values per tile, and rows and columns of a block of weights."""
    power_of_two: bool = False
    """Round scales up to powers of two, so that scaling is exact; DeepSeek-V3 does so for some activations."""

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"a block has 1 value or more, not {self.size}")

    @property
    def block_size(self) -> int:
        return self.size

    def measure(self, x: Float[Array, "*dims"], axes: Sequence[str]) -> None:
        """Return None: no scale is for a whole tensor."""

    def quantize_input(self, x: Float[Array, "*rows in"], amax: Float[Array, "..."] | None, axis: int) -> ScaledTensor:
        return quantize_blocks(x, make_tile(x.ndim, axis, self.size), self._find_block_multiplier)

    def quantize_weight(
        self, weight: Float[Array, "*experts rows columns"], amax: Float[Array, "..."] | None, axis: int
    ) -> ScaledTensor:
        return quantize_blocks(weight, (self.size, self.size), self._find_block_multiplier)

    def quantize_gradient(
        self,
        gradient: Float[Array, "*rows out"],
        amax: Float[Array, "..."] | None,
        axis: int,
        bits: UInt32[Array, "*padded out"] | None,
    ) -> ScaledTensor:
        return self.quantize_input(gradient, amax, axis)

    def _find_block_multiplier(self, amax: Float[Array, "*blocks"]) -> tuple[Float[Array, "*blocks"], ...]:
        multiplier = find_multiplier(amax, float(jnp.finfo(E4M3).max))
        if self.power_of_two:
            fraction, exponent = jnp.frexp(multiplier)
            multiplier = jnp.ldexp(jnp.ones_like(fraction), exponent - 1)
        return multiplier, 1 / multiplier


def make_tile(ndim: int, axis: int, size: int) -> tuple[int, ...]:
    """Return the shape of a tile of `size` values along one axis."""
    tile = [1] * ndim
    tile[axis] = size
    return tuple(tile)


def find_block_amax(x: Float[Array, "*dims"], block: tuple[int, ...]) -> Float[Array, "*blocks"]:
    """Return max |x| of each block. The last block of a dim may be smaller."""
    padding = [(0, -length % size) for length, size in zip(x.shape, block, strict=True)]
    padded = jnp.pad(jnp.abs(x).astype(jnp.float32), padding)
    shape = [part for length, size in zip(padded.shape, block, strict=True) for part in (length // size, size)]
    return padded.reshape(shape).max(tuple(range(1, 2 * x.ndim, 2)))


def quantize_blocks(x: Float[Array, "*dims"], block: tuple[int, ...], find: Callable) -> ScaledTensor:
    """Quantize with one scale per block. `find` maps the maxima of blocks to multipliers and to the stored scales, in
    the dtype in which they are stored; a maximum that is not finite gives NaN."""
    largest = find_block_amax(x, block)
    multiplier, scales = find(largest)
    multiplier = jnp.where(jnp.isfinite(largest), multiplier, jnp.nan)
    values = saturating_cast(x.astype(jnp.float32) * expand_blocks(multiplier, block, x.shape), E4M3)
    return ScaledTensor(values, jnp.ones((), jnp.float32), scales, block)
