"""Projectors: from the patches that a tower reads to features in the places of a text's image tokens.

Their results have no annotated dim of features: a layout may shard the tokens of one that is named `embed`.
"""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from einops import rearrange, reduce
from jaxtyping import Array, Float, Int, Key

from zoo.parallel import Dim, Module
from zoo.shapes import HiddenStates

from ..abstract import AbstractLinear, AbstractNorm
from ..linear import Linear

Grid = tuple[int, int]
"""Rows and columns of patches."""
Features = Float[Array, "batch features _"]


class AbstractProjector(Module):
    """From the hidden states of a tower to features, one image of a row after the other: `(x, grid)` for
    images with one grid of patches, `(x, images)` for `PackedImages`, in the order of their patches. Features after the
    last image are finite, and mean nothing."""

    @abc.abstractmethod
    def __call__(self, x: HiddenStates, images: Any) -> Features:
        """Return the features of each row."""

    @abc.abstractmethod
    def count_features(self, grid: Grid) -> int:
        """Return the number of features of an image with this grid of patches."""

    def count_packed(self, grids: Int[np.ndarray, "batch images 3"]) -> Int[np.ndarray, "batch images"]:
        """Return the number of features of each of packed images."""
        flat = grids.reshape(-1, 3).tolist()
        counts = [steps * self.count_features((rows, columns)) for steps, rows, columns in flat]
        return np.asarray(counts, int).reshape(grids.shape[:2])


class AbstractMerger(AbstractProjector):
    """A projector that makes one feature of `merge` x `merge` patches."""

    merge: eqx.AbstractVar[int]

    def count_features(self, grid: Grid) -> int:
        return (grid[0] // self.merge) * (grid[1] // self.merge)


class MLPProjector(AbstractMerger):
    """W_out activation(W_in norm(shuffle(x)) + b) + b (LLaVA-1.5, Liu et al., arXiv:2310.03744, section 3.3; InternVL,
    Chen et al., arXiv:2404.16821, section 3.1). `shuffle` joins `merge` x `merge` patches, if `merge` is above 1."""

    norm: AbstractNorm | None
    up: AbstractLinear
    out: AbstractLinear

    activation: Callable = eqx.field(static=True)
    merge: int = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        hidden: int,
        out: int,
        activation: Callable,
        *,
        norm: Callable[[], AbstractNorm] | None = None,
        merge: int = 1,
        bias: bool = True,
        key: Key[Array, ""],
    ):
        """- `embed`: features of a patch. `out`: features of the decoder.
        - `norm`: factory of a norm of the features of `merge` x `merge` patches.
        """
        up_key, out_key = jax.random.split(key)
        self.norm = None if norm is None else norm()
        self.up = Linear(embed * merge**2, hidden, in_=Dim("embed"), out=Dim("mlp"), bias=bias, key=up_key)
        self.out = Linear(hidden, out, in_=Dim("mlp"), bias=bias, key=out_key)
        self.activation = activation
        self.merge = merge

    def __call__(self, x: HiddenStates, images: Grid) -> Features:
        x = shuffle_pixels(x, images, self.merge)
        if self.norm is not None:
            x = self.norm(x)
        return self.out(self.activation(self.up(x)))


class LinearProjector(AbstractMerger):
    """W shuffle(x) + b (PaliGemma, arXiv:2407.07726, section 3.1; Idefics 3, arXiv:2408.12637, section 4.1). `shuffle`
    joins `merge` x `merge` patches, if `merge` is above 1."""

    out: AbstractLinear

    merge: int = eqx.field(static=True)

    def __init__(self, embed: int, out: int, *, merge: int = 1, bias: bool = True, key: Key[Array, ""]):
        """`embed`: features of a patch. `out`: features of the decoder."""
        self.out = Linear(embed * merge**2, out, in_=Dim("embed"), bias=bias, key=key)
        self.merge = merge

    def __call__(self, x: HiddenStates, images: Grid) -> Features:
        return self.out(shuffle_pixels(x, images, self.merge))


class PooledProjector(AbstractProjector):
    """W norm(pool(x)), the mean over squares of patches so that `side` x `side` features are left (Gemma 3,
    arXiv:2503.19786, section 2)."""

    norm: AbstractNorm
    out: AbstractLinear

    side: int = eqx.field(static=True)

    def __init__(self, embed: int, out: int, norm: Callable[[], AbstractNorm], *, side: int, key: Key[Array, ""]):
        """`embed`: features of a patch. `out`: features of the decoder."""
        self.norm = norm()
        self.out = Linear(embed, out, in_=Dim("embed"), key=key)
        self.side = side

    def __call__(self, x: HiddenStates, images: Grid) -> Features:
        """**Raises** `ValueError` for a grid that does not divide into `side` x `side` squares."""
        if any(size % self.side for size in images):
            raise ValueError(f"{images[0]} x {images[1]} patches do not divide into {self.side} x {self.side} squares")
        pooled = reduce(x, "b (y dy x dx) e -> b (y x) e", "mean", y=self.side, x=self.side, dy=images[0] // self.side)
        return self.out(self.norm(pooled))

    def count_features(self, grid: Grid) -> int:
        return self.side**2


def shuffle_pixels(x: HiddenStates, grid: Grid, merge: int) -> Float[Array, "batch features joined"]:
    """Join the features of each square of `merge` x `merge` patches, row by row (pixel shuffle, Shi et al.,
    arXiv:1609.05158). **Raises** `ValueError` for a grid that `merge` does not divide."""
    if merge == 1:
        return x
    if any(size % merge for size in grid):
        raise ValueError(f"{grid[0]} x {grid[1]} patches do not divide into squares of {merge} x {merge}")
    return rearrange(x, "b (y dy x dx) e -> b (y x) (dy dx e)", y=grid[0] // merge, dy=merge, dx=merge)
