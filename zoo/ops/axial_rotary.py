"""Axial rotary embedding: RoPE in two dimensions, for the patches of an image.

One half of the pairs of each head turns by the row of its patch, the other by the column (Heo et al.,
arXiv:2403.13298; DINOv3, arXiv:2508.10104):

    frequency_i = base ** (-4 i / dim)             i = 0 .. dim / 4 - 1
    angles      = 2 pi [row * frequency, column * frequency]

Rows and columns are the coordinates of the patches' centers, from -1 at the top left of the image to 1 at the bottom
right, whatever its size. A token at (0, 0), such as a class token, is not turned.

Encoders of images of several shapes (Qwen2-VL, arXiv:2409.12191; Pixtral, arXiv:2410.07073) count rows and columns from
0 on, and turn by 1 instead of 2 pi. Pixtral's axes alternate over the frequencies of one-dimensional RoPE:

    row: base ** (-4 i / dim)     column: base ** (-(4 i + 2) / dim)
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .rotary import apply_rotary


@dataclasses.dataclass(frozen=True)
class AxialRotary:
    """Two-dimensional RoPE of heads with `dim` features; feature i is paired with i + dim / 2.

    **Raises** `ValueError` for a `dim` that is not a multiple of 4.
    """

    dim: int
    base: int | float = 100.0
    turn: float = 2 * math.pi
    """Angle of the first pair at coordinate 1."""
    alternating: bool = False
    """Rows and columns take the frequencies of one-dimensional RoPE in turn, instead of equal ones."""
    halves: bool = False
    """Columns turn the first half of each head and rows the second, and feature i is paired with i + dim / 4 of its
    half, as in Gemma 4. See `apply_axial_rotary`."""
    interleaved = False

    def __post_init__(self):
        if self.dim < 4 or self.dim % 4:
            raise ValueError(f"AxialRotary: pairs of features turn by row and by column, so 4 divides dim={self.dim}")

    def __call__(
        self, coordinates: Float[Array, "*batch seq 2"]
    ) -> tuple[Float[Array, "*batch seq pairs"], Float[Array, "*batch seq pairs"]]:
        """Compute cos and sin of the angles of each token at (row, column), in float32."""
        exponents = np.arange(0, self.dim, 4) / self.dim
        shift = 2 / self.dim if self.alternating else 0
        frequencies = self.turn * self.base ** -np.stack([exponents, exponents + shift])
        if self.halves:
            coordinates = coordinates[..., ::-1]
        angles = coordinates[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
        angles = angles.reshape(*coordinates.shape[:-1], self.dim // 2)
        two = np.float32(2)  # a remainder is not fused: see `Rotary`
        return lax.rem(jnp.cos(angles), two), lax.rem(jnp.sin(angles), two)


def apply_axial_rotary(
    x: Float[Array, "batch seq heads head_dim"],
    cos: Float[Array, "#batch seq pairs"],
    sin: Float[Array, "#batch seq pairs"],
    *,
    halves: bool,
) -> Float[Array, "batch seq heads head_dim"]:
    """Apply two-dimensional RoPE to the heads, or to each half of them by itself. The result has the dtype of `x`."""
    if not halves:
        return apply_rotary(x, cos, sin)
    first, second = zip(*(jnp.split(array, 2, axis=-1) for array in (x, cos, sin)), strict=True)
    return jnp.concatenate([apply_rotary(*first), apply_rotary(*second)], axis=-1)


def patch_coordinates(height: int, width: int) -> Float[np.ndarray, "patches 2"]:
    """Return (row, column) of the center of each patch in a grid, row by row, between -1 and 1."""
    rows, columns = ((2 * np.arange(size, dtype=np.float32) + 1) / size - 1 for size in (height, width))
    return np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)
