"""Projectors of packed images, which merge patches to fewer features."""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.activations import gelu
from zoo.parallel import Dim
from zoo.shapes import HiddenStates

from ..abstract import AbstractLinear, AbstractNorm
from ..linear import Linear
from .packed_images import PackedImages
from .projectors import AbstractMerger, AbstractProjector, Features, Grid


class PatchMerger(AbstractMerger):
    """W_down gelu(W_up join(norm(x)) + b) + b' of each block of `merge` x `merge` patches (Qwen2-VL, arXiv:2409.12191,
    section 2.1). Its patches come one after the other. With `joins_first` the norm is of the joined patches."""

    norm: AbstractNorm
    up: AbstractLinear
    down: AbstractLinear

    merge: int = eqx.field(static=True)
    joins_first: bool = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        features: int,
        norm: Callable[[int], AbstractNorm],
        *,
        merge: int,
        joins_first: bool = False,
        key: Key[Array, ""],
    ):
        """`features`: of the result. `norm`: a function from the number of features to a norm."""
        up_key, down_key = jax.random.split(key)
        joined = merge**2 * embed
        self.norm = norm(joined if joins_first else embed)
        self.up = Linear(joined, joined, in_=Dim("embed"), out=Dim("mlp"), bias=True, key=up_key)
        self.down = Linear(joined, features, in_=Dim("mlp"), bias=True, key=down_key)
        self.merge = merge
        self.joins_first = joins_first

    def __call__(self, x: HiddenStates, images: PackedImages | None = None) -> Features:
        count = self.merge**2
        x = x[:, : x.shape[1] // count * count]  # what is left over is padding
        if not self.joins_first:
            x = self.norm(x)
        x = x.reshape(x.shape[0], -1, count * x.shape[-1])
        if self.joins_first:
            x = self.norm(x)
        return self.down(gelu(self.up(x)))


class DeepstackMerger(AbstractProjector):
    """A merger of the last layer, and one of each layer that is kept for a layer of the language model, with norms of
    joined patches (Qwen3-VL, arXiv:2511.21631, section 2)."""

    merger: PatchMerger
    deepstack: tuple[PatchMerger, ...]

    @property
    def merge(self) -> int:
        """Rows, and columns, of the patches of a token."""
        return self.merger.merge

    def __call__(self, x: HiddenStates, images: PackedImages | None = None) -> Features:
        return self.merger(x, images)

    def count_features(self, grid: Grid) -> int:
        return self.merger.count_features(grid)

    def merge_kept(self, kept: Sequence[HiddenStates], images: PackedImages | None = None) -> tuple[Features, ...]:
        """Return the features of each layer that is kept, `DeepstackHidden.kept`."""
        return tuple(merger(x, images) for merger, x in zip(self.deepstack, kept, strict=True))


class UnfoldingMerger(AbstractMerger):
    """W_down activation(W_up W_merge unfold(norm(x))), with `merge` x `merge` patches unfolded to one vector, in which
    the places of a block are next to each other for each channel (Mistral Small 3.1, 2025). Patches come row by row."""

    norm: AbstractNorm
    merger: AbstractLinear
    up: AbstractLinear
    down: AbstractLinear

    merge: int = eqx.field(static=True)
    activation: Callable = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        features: int,
        norm: Callable[[int], AbstractNorm],
        *,
        merge: int,
        activation: Callable = gelu,
        bias: bool = False,
        key: Key[Array, ""],
    ):
        """`features`: of the result. `norm`: a function from the number of features to a norm."""
        merge_key, up_key, down_key = jax.random.split(key, 3)
        self.norm = norm(embed)
        self.merger = Linear(merge**2 * embed, embed, in_=Dim("embed"), key=merge_key)
        self.up = Linear(embed, features, in_=Dim("embed"), out=Dim("mlp"), bias=bias, key=up_key)
        self.down = Linear(features, features, in_=Dim("mlp"), bias=bias, key=down_key)
        self.merge = merge
        self.activation = activation

    def __call__(self, x: HiddenStates, images: PackedImages) -> Features:
        blocks = gather_blocks(self.norm(x), images, self.merge)
        joined = blocks.swapaxes(-1, -2).reshape(*blocks.shape[:2], -1)
        return self.down(self.activation(self.up(self.merger(joined))))


def gather_blocks(x: HiddenStates, images: PackedImages, block: int) -> Float[Array, "batch tokens places embed"]:
    """Return the hidden states of the patches of each block, of patches that come row by row."""
    indices = images.find_blocks(block)
    blocks = jnp.take_along_axis(x, indices.reshape(len(indices), -1, 1), axis=1)
    return blocks.reshape(*indices.shape, x.shape[-1])


class MeanMerger(AbstractMerger):
    """W norm(sqrt(embed) mean(x)) over each block of `merge` x `merge` patches (Gemma team, "Gemma 4", 2026).
    Patches come row by row. Means and their scale are computed in float32."""

    norm: AbstractNorm
    projection: AbstractLinear

    merge: int = eqx.field(static=True)

    def __init__(
        self, embed: int, features: int, norm: Callable[[int], AbstractNorm], *, merge: int, key: Key[Array, ""]
    ):
        """`features`: of the result. `norm`: a function from the number of features to a norm."""
        self.norm = norm(embed)
        self.projection = Linear(embed, features, in_=Dim("embed"), key=key)
        self.merge = merge

    def __call__(self, x: HiddenStates, images: PackedImages) -> Features:
        mean = gather_blocks(x, images, self.merge).mean(axis=2, dtype=jnp.float32).astype(x.dtype)
        pooled = mean.astype(jnp.float32) * x.shape[-1] ** 0.5
        return self.projection(self.norm(pooled.astype(x.dtype)))
