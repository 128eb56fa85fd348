"""Embedding of packed images: patches of several shapes, with learned positions or without."""

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.ops.resize import corner_weights
from zoo.parallel import Dim, Module
from zoo.shapes import HiddenStates, SegmentIds

from ..abstract import AbstractLinear
from ..linear import Linear, truncated_normal
from .packed_images import PackedImages, PatchPlaces


class AbstractPatchPositions(Module):
    """Learned positions of the patches of images of any shape."""

    weight: eqx.AbstractVar[Array]

    @abc.abstractmethod
    def __call__(self, places: PatchPlaces) -> Float[Array, "batch patches embed"]:
        """Return the position of each patch, in the dtype of the weight."""


class GridPositions(AbstractPatchPositions):
    """Learned positions of a square grid, interpolated linearly to the grid of each image; the corners of both coincide
    (Qwen3-VL, arXiv:2511.21631, section 2)."""

    weight: Float[Array, "positions embed"]

    side: int = eqx.field(static=True)
    """Rows, and columns, of patches that positions were learned for."""

    def __init__(self, side: int, embed: int, *, scale: float = 0.02, key: Key[Array, ""]):
        """`scale`: standard deviation of the initial weights."""
        self.weight = truncated_normal(key, (side**2, embed), scale)
        self.side = side

    def __call__(self, places: PatchPlaces) -> Float[Array, "batch patches embed"]:
        by_row = corner_weights(self.side, places.rows, places.row)
        by_column = corner_weights(self.side, places.columns, places.column)
        weights = (by_row[..., :, None] * by_column[..., None, :]).reshape(*places.row.shape, -1)
        positions = jnp.einsum("bpg,ge->bpe", weights, self.weight.astype(jnp.float32), precision="highest")
        return positions.astype(self.weight.dtype)


class AxisPositions(AbstractPatchPositions):
    """Learned positions of columns and of rows: the position of a patch is their sum (Gemma team, "Gemma 4", 2026)."""

    weight: Float[Array, "2 positions embed"]

    def __init__(self, positions: int, embed: int, *, scale: float = 0.02, key: Key[Array, ""]):
        """`positions`: the most rows, or columns, of an image. `scale`: standard deviation of the initial weights."""
        self.weight = truncated_normal(key, (2, positions, embed), scale)

    def __call__(self, places: PatchPlaces) -> Float[Array, "batch patches embed"]:
        columns, rows = self.weight
        return columns.at[places.column].get(mode="clip") + rows.at[places.row].get(mode="clip")


class PackedImageEmbedding(Module):
    """Tokens of `PackedImages`: W patch + b, and learned positions if there are any. Pixels in [0, 1] may be `centered`
    to [-1, 1] first.

    Patches come in blocks of `merge` x `merge`, one after the other, and row by row for 1. With a `window` they are
    sorted into windows of as many rows and columns of patches (Qwen2.5-VL, arXiv:2502.13923, section 2.1.1), each of
    which is a segment of `TokenInfo.windows`; `restore` undoes it.
    """

    patches: AbstractLinear
    positions: AbstractPatchPositions | None

    pixels: int = eqx.field(static=True)
    """Numbers of a flattened patch."""
    merge: int = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    centered: bool = eqx.field(static=True)

    reads = PackedImages

    def __init__(
        self,
        pixels: int,
        embed: int,
        *,
        bias: bool = False,
        positions: AbstractPatchPositions | None = None,
        merge: int = 1,
        window: int | None = None,
        centered: bool = False,
        key: Key[Array, ""],
    ):
        """`pixels`: numbers of a flattened patch. **Raises** `ValueError` for windows that divide blocks."""
        if window is not None and (window < 1 or window % merge):
            raise ValueError(f"a window of {window} patches has whole blocks of merge={merge}")
        self.patches = Linear(pixels, embed, out=Dim("embed"), bias=bias, key=key)
        self.positions = positions
        self.pixels = pixels
        self.merge = merge
        self.window = window
        self.centered = centered

    def __call__(self, images: PackedImages, masked: None = None) -> Float[Array, "batch patches embed"]:
        """Embed patches, in the dtype of the positions, or of the weight if it is one matrix. **Raises** `ValueError`
        for `masked` patches, which need a mask token, and for patches of another number of pixels."""
        if masked is not None:
            raise ValueError("masked patches need a mask token, which this model does not have")
        if images.pixels.shape[-1] != self.pixels:
            raise ValueError(f"images: expected patches of {self.pixels} pixels, got {images.pixels.shape[-1]}")
        pixels = 2 * images.pixels - 1 if self.centered else images.pixels
        if self.positions is None:
            dtype = self.patches.weight.dtype if isinstance(self.patches, Linear) else pixels.dtype
            x = self.patches(pixels.astype(dtype))
        else:
            positions = self.positions(images.locate(self.merge))
            x = self.patches(pixels.astype(positions.dtype)) + positions
        order = self._find_order(images)
        if order is None:
            return x
        return jnp.take_along_axis(x, order[..., None], axis=1)

    def compute_coordinates(self, images: PackedImages) -> Float[Array, "batch patches 2"]:
        """Return row and column of each token."""
        coordinates = images.locate(self.merge).stack_coordinates()
        order = self._find_order(images)
        if order is None:
            return coordinates
        return jnp.take_along_axis(coordinates, order[..., None], axis=1)

    def find_segments(self, images: PackedImages) -> tuple[SegmentIds, SegmentIds | None]:
        """Return the segments of the tokens: images and steps of films, and windows of them if there are any."""
        places = images.locate(self.merge)
        order = self._find_order(images)
        if self.window is None or order is None:
            return places.segments, None
        ids = (places.segments, places.find_windows(self.window))
        segments, windows = (jnp.take_along_axis(x, order, axis=1) for x in ids)
        return segments, windows

    def restore(self, x: HiddenStates, images: PackedImages) -> HiddenStates:
        """Return hidden states of tokens in the order of the patches of `images`."""
        order = self._find_order(images)
        if order is None:
            return x
        return jnp.take_along_axis(x, jnp.argsort(order, axis=1)[..., None], axis=1)

    def _find_order(self, images: PackedImages) -> Int[Array, "batch patches"] | None:
        """Return the index of the patch of each token; None if tokens are in the order of patches."""
        if self.window is None:
            return None
        windows = images.locate(self.merge).find_windows(self.window)
        last = jnp.iinfo(windows.dtype).max
        return jnp.argsort(jnp.where(windows > 0, windows, last), axis=1, stable=True)
