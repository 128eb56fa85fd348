"""Images of several shapes, the patches of all images of a row one after the other, as texts are packed."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.parallel import Module


class PatchPlaces(Module):
    """Places of the patches of a row, in the order of `PackedImages.pixels`. Padding has a finite place, too."""

    segments: Int[Array, "batch patches"]
    """Segment ids, with which patches attend within their image, or within their step of a film; 0 for padding."""
    row: Int[Array, "batch patches"]
    column: Int[Array, "batch patches"]
    rows: Int[Array, "batch patches"]
    """Rows of patches of the image."""
    columns: Int[Array, "batch patches"]

    def stack_coordinates(self) -> Float[Array, "batch patches 2"]:
        """Return row and column of each patch, for `zoo.ops.axial_rotary`."""
        return jnp.stack([self.row, self.column], axis=-1).astype(jnp.float32)

    def find_windows(self, size: int) -> Int[Array, "batch patches"]:
        """Return ids of windows of `size` x `size` patches, growing through a row; 0 for padding. Windows at the right
        and at the lower edge of an image are smaller."""
        across = -(-self.columns // size)
        window = self.row // size * across + self.column // size  # fewer than patches, so no id occurs twice
        return jnp.where(self.segments > 0, self.segments + window, 0)


class PackedImages(Module):
    """The patches of the images of each row, one image after the other, with padding at the end.

    An image is a grid of patches; a film is a grid of several steps in time. Row first, so that meshes and
    micro-batches slice images together with the texts that they belong to.
    """

    pixels: Float[Array, "batch patches pixels"]
    """Flattened patches, in the order and layout of the checkpoint's image processor."""
    grids: Int[Array, "batch images 3"]
    """Steps, rows and columns of patches of each image; 0 where a row has fewer images."""
    seconds: Float[Array, "batch images"] | None = None
    """Seconds between the steps of each film; None for 1."""

    def count_patches(self) -> Int[Array, "batch images"]:
        """Return the number of patches of each image."""
        return self.grids.prod(axis=-1)

    def find_images(self) -> Int[Array, "batch patches"]:
        """Return the number of the image of each patch, counted from 1 in its row, and 0 for padding: segment ids, with
        which patches attend within their image."""
        return _number_items(self.count_patches(), self.pixels.shape[1])

    def locate(self, block: int = 1) -> PatchPlaces:
        """Return the places of patches that come row by row, or in blocks of `block` x `block` one after the other."""
        number = self.find_images()
        index = jnp.arange(number.shape[1])
        starts = _find_starts(self.count_patches())
        start, rows, columns = _pick(number, starts, self.grids[..., 1], self.grids[..., 2])
        rows = jnp.maximum(rows, 1)
        columns = jnp.maximum(columns, 1)
        place = (index - start) % (rows * columns)
        segments = jnp.where(number > 0, index - place + 1, 0)
        across = jnp.maximum(columns // block, 1)
        first = place // block**2
        row = first // across * block + place // block % block
        column = first % across * block + place % block
        return PatchPlaces(segments, row, column, rows, columns)

    def find_blocks(self, block: int) -> Int[Array, "batch blocks places"]:
        """Return the indices of the patches of each block of `block` x `block`, where patches come row by row. Blocks
        are in the order of rows of blocks, image after image; indices after the last block are of any patches.

        Rows and columns of patches beyond the last whole block are left out.
        """
        patches = self.pixels.shape[1]
        whole = self.grids // jnp.array([1, block, block])
        counts = whole.prod(axis=-1)
        number = _number_items(counts, patches // block**2)
        picked = (_find_starts(counts), _find_starts(self.count_patches()), *jnp.moveaxis(self.grids, -1, 0))
        start, first, _, rows, columns = _pick(number, *picked)
        across = jnp.maximum(columns // block, 1)
        in_step = jnp.maximum(rows // block, 1) * across
        index = jnp.arange(number.shape[1]) - start
        step = index // in_step
        place = index % in_step
        corner = first + (step * rows + place // across * block) * columns + place % across * block
        offset = jnp.arange(block)
        indices = corner[..., None, None] + offset[:, None] * columns[..., None, None] + offset
        return jnp.minimum(indices.reshape(*number.shape, block**2), patches - 1)


def _number_items(counts: Int[Array, "batch images"], total: int) -> Int[Array, "batch items"]:
    """Return the number of the image of each of `total` items, of which images have `counts`: from 1 on, and 0 after
    the last."""
    ends = jnp.cumsum(counts, axis=1)
    place = jnp.arange(total)
    number = 1 + (place[None, :, None] >= ends[:, None, :]).sum(-1)
    return jnp.where(place < ends[:, -1:], number, 0).astype(jnp.int32)


def _find_starts(counts: Int[Array, "batch images"]) -> Int[Array, "batch images"]:
    return jnp.cumsum(counts, axis=1) - counts


def _pick(number: Int[Array, "batch items"], *values: Int[Array, "batch images"]) -> list[Int[Array, "batch items"]]:
    """Return the values of the image of each item; of the first image for padding."""
    index = jnp.maximum(number - 1, 0)
    return [jnp.take_along_axis(x, index, axis=1) for x in values]
