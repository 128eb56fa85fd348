"""The processed pictures of one text, and the images of a batch that they are joined to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from zoo.layers.encoders.masked_images import MaskedImages
from zoo.layers.encoders.packed_images import PackedImages


@dataclass(frozen=True)
class ProcessedImages:
    """Pixels of the pictures of one text, and the shape of what each becomes: images of one size, or packed patches."""

    pixels: Float[np.ndarray, "images 3 height width"] | Float[np.ndarray, "patches pixels"]
    """Images, each picture's one after the other: the picture as a whole and its tiles, in the order of the family. Or
    flattened patches of all pictures, one after the other."""
    shapes: Int[np.ndarray, "pictures 2"]
    """Rows and columns of the tiles of each picture, 0 and 0 for the whole picture only. For patches: rows and columns
    of the tokens that they become."""
    grids: Int[np.ndarray, "pictures 3"] | None = None
    """For patches: steps in time, which are 1, rows and columns of patches of each picture."""
    mask: Bool[np.ndarray, "images height width"] | None = None
    """True for pixels that are not padding, in families that read such a mask."""


Tiled = tuple[Float[np.ndarray, "_ 3 _ _"], tuple[int, int]]
"""The images of one picture, and rows and columns of its tiles."""
Packed = tuple[Float[np.ndarray, "_ _"], tuple[int, int], tuple[int, int]]
"""The flattened patches of one picture, its rows and columns of patches, and of tokens."""


class Measured(NamedTuple):
    """The shapes of what a picture becomes."""

    pixels: tuple[int, ...]
    """Shape of its images, "images 3 height width", or of its patches, "patches pixels"."""
    shape: tuple[int, int]
    """As in `ProcessedImages.shapes`."""
    grid: tuple[int, int] = (0, 0)
    """Rows and columns of patches."""


def join_measured(pictures: list[Measured], has_mask: bool) -> ProcessedImages:
    """Join the shapes of pictures, with pixels of zeros that take no memory. **Raises** as `join_tiles` does."""
    is_packed = len(pictures[0].pixels) == 2
    if not is_packed:
        _check_sizes([x.pixels for x in pictures])
    count = sum(x.pixels[0] for x in pictures)
    pixels = np.broadcast_to(np.float32(0), (count, *pictures[0].pixels[1:]))
    shapes = np.array([x.shape for x in pictures], np.int32)
    if is_packed:
        return ProcessedImages(pixels, shapes, np.array([(1, *x.grid) for x in pictures], np.int32))
    if has_mask:
        return ProcessedImages(pixels, shapes, mask=np.broadcast_to(True, (count, *pixels.shape[2:])))
    return ProcessedImages(pixels, shapes)


def _check_sizes(shapes: Sequence[tuple[int, ...]]) -> None:
    """**Raises** `ValueError` for images of several sizes."""
    sizes = [f"{shape[2]} x {shape[3]}" for shape in shapes]
    if others := [size for size in sizes if size != sizes[0]]:
        raise ValueError(f"pictures become {others[0]} pixels and {sizes[0]}: a batch has one size")


def join_tiles(pictures: list[Tiled]) -> ProcessedImages:
    """Join the images of pictures. **Raises** `ValueError` for images of several sizes."""
    _check_sizes([x.shape for x, _ in pictures])
    return ProcessedImages(
        np.concatenate([x for x, _ in pictures]), np.array([shape for _, shape in pictures], np.int32)
    )


def join_masked_tiles(pictures: list[Tiled]) -> ProcessedImages:
    """Join the images of pictures, with a mask. No pixel of an image is padding; only whole images are, in a batch."""
    joined = join_tiles(pictures)
    count, _, height, width = joined.pixels.shape
    return ProcessedImages(joined.pixels, joined.shapes, mask=np.ones((count, height, width), bool))


def join_patches(pictures: list[Packed]) -> ProcessedImages:
    """Join the patches of pictures."""
    pixels, grids, shapes = zip(*pictures, strict=True)
    grids = np.array([(1, *grid) for grid in grids], np.int32)
    return ProcessedImages(np.concatenate(pixels), np.array(shapes, np.int32), grids)


def join_rows(
    rows: Sequence[ProcessedImages | None],
) -> Float[Array, "batch images 3 height width"] | MaskedImages | PackedImages:
    """Return the images of a batch of texts, padded with zeros; None stands for a text without pictures.

        config = zoo.images.read_image_config(directory)
        rows = [zoo.images.preprocess_images(pictures, config) for pictures in pictures_of_texts]
        images = zoo.images.join_rows(rows)

    Images of one size are an array, with a mask `MaskedImages`; packed patches are `PackedImages`.

    **Raises** `ValueError` for a batch without pictures, and for rows of several image processors or sizes.
    """
    given = [row for row in rows if row is not None]
    if not given:
        raise ValueError("expected a picture in one of the rows: a batch of texts only needs no images")
    kinds = {(row.pixels.shape[1:], row.grids is None, row.mask is None) for row in given}
    if len(kinds) > 1:
        shapes = " and ".join(sorted(str(shape) for shape, _, _ in kinds))
        raise ValueError(f"rows have images or patches of shapes {shapes}: expected one image processor and one size")
    pixels = _pad_rows([None if row is None else row.pixels for row in rows])
    if given[0].grids is not None:
        return PackedImages(pixels, _pad_rows([None if row is None else row.grids for row in rows]))
    if given[0].mask is not None:
        return MaskedImages(pixels, _pad_rows([None if row is None else row.mask for row in rows]))
    return pixels


def _pad_rows(rows: Sequence[np.ndarray | None]) -> Array:
    """Stack rows, padded with zeros to the longest."""
    given = [row for row in rows if row is not None]
    padded = np.zeros((len(rows), max(len(row) for row in given), *given[0].shape[1:]), given[0].dtype)
    for target, row in zip(padded, rows, strict=True):
        if row is not None:
            target[: len(row)] = row
    return jnp.asarray(padded)
