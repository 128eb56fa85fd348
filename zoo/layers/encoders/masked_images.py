"""Images of one size with a mask of their pixels, row first."""

import jax
import jax.numpy as jnp
from einops import reduce
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.parallel import Module
from zoo.shapes import Positions

from .patches import PatchEmbedding, PatchPositions


class MaskedImages(Module):
    """The images of each row, with a mask of the pixels that are not padding (Idefics 3, Laurençon et al.,
    arXiv:2408.12637)."""

    pixels: Float[Array, "batch images 3 height width"]
    mask: Bool[Array, "batch images height width"]
    """True for pixels, False for padding: all of an image where a row has fewer images."""


class MaskedImageEmbedding(Module):
    """Tokens of `MaskedImages`, of one image a row: W patch + b + positions. A patch counts if any of its pixels is not
    masked, and patch i of n rows (or columns) that count has position floor(i / n * side) of the learned grid, whatever
    n (NaViT, Dehghani et al., arXiv:2307.06304, section 3.1)."""

    patches: PatchEmbedding
    positions: PatchPositions

    reads = MaskedImages
    num_other = 0

    def __init__(
        self, channels: int, embed: int, *, patch_size: tuple[int, int], grid: tuple[int, int], key: Key[Array, ""]
    ):
        """`grid`: rows and columns of patches to learn positions for."""
        patch_key, position_key = jax.random.split(key)
        self.patches = PatchEmbedding(channels, embed, patch_size, key=patch_key)
        self.positions = PatchPositions(grid, embed, key=position_key)

    def __call__(self, images: MaskedImages, masked: None = None) -> Float[Array, "batch patches embed"]:
        """Embed patches. **Raises** `ValueError` for `masked` patches, which need a mask token."""
        if masked is not None:
            raise ValueError("masked patches need a mask token, which this model does not have")
        is_real = self._find_patches(images)
        rows, columns = self.positions.grid
        row = _stretch(is_real[:, :, 0], rows)
        column = _stretch(is_real[:, 0], columns)
        number = jnp.where(is_real, row[:, :, None] * columns + column[:, None, :], 0)
        return self.patches(images.pixels[:, 0]) + self.positions.weight[number.reshape(len(number), -1)]

    def find_positions(self, images: MaskedImages) -> Positions:
        """Return 0 for tokens that count, and -1 for padding, which no token attends to. Padding attends to the others:
        a projector may join it with them."""
        is_real = self._find_patches(images)
        return jnp.where(is_real, 0, -1).reshape(len(is_real), -1)

    def compute_coordinates(self, images: MaskedImages) -> None:
        """Return None: positions are learned."""

    def _find_patches(self, images: MaskedImages) -> Bool[Array, "batch rows columns"]:
        """Return True for patches that count."""
        height, width = self.patches.patch_size
        rows, columns = self.patches.count_patches(images.pixels[:, 0])
        mask = images.mask[:, 0, : rows * height, : columns * width]
        return reduce(mask, "b (y h) (x w) -> b y x", "max", h=height, w=width)


def _stretch(is_real: Bool[Array, "batch places"], side: int) -> Int[Array, "batch places"]:
    """Return floor(i / n * side) for each of the first n places, those that are real."""
    count = jnp.maximum(is_real.sum(1, keepdims=True), 1)
    return jnp.arange(is_real.shape[1]) * side // count
