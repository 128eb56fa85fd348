"""Where the images of a text stand: which tokens attend to each other in both directions, and positions in time, row
and column. A model has one of these rules, which turns tokens and images into a `TokenInfo`."""

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.layers import TokenInfo
from zoo.layers.encoders.packed_images import PackedImages
from zoo.layers.token_info import count_lookahead
from zoo.shapes import Tokens

Spans = Int[Array, "batch seq"]
"""Ids of spans: neighbors with the same id above 0 attend to each other in both directions."""


@dataclasses.dataclass(frozen=True)
class AbstractPlaces(abc.ABC):
    """A rule of the places of images: `(tokens, is_image, images, info, spans) -> info`."""

    reads_ahead = False
    """True if the rule makes spans."""

    @abc.abstractmethod
    def describe(
        self, tokens: Tokens, is_image: Bool[Array, "batch seq"], images: Any, info: TokenInfo, spans: Spans | None
    ) -> TokenInfo:
        """Return `info` with the places of images. `spans` are those that the caller gives, if any."""


@dataclasses.dataclass(frozen=True)
class CausalPlaces(AbstractPlaces):
    """Each token of an image attends to those before it, as each token of the text does (LLaVA, arXiv:2304.08485)."""

    def describe(
        self, tokens: Tokens, is_image: Bool[Array, "batch seq"], images: Any, info: TokenInfo, spans: Spans | None
    ) -> TokenInfo:
        return look_ahead(info, spans)


@dataclasses.dataclass(frozen=True)
class ImageSpans(AbstractPlaces):
    """The tokens of an image attend to each other in both directions (Gemma 3, arXiv:2503.19786, section 2)."""

    reads_ahead = True

    def describe(
        self, tokens: Tokens, is_image: Bool[Array, "batch seq"], images: Any, info: TokenInfo, spans: Spans | None
    ) -> TokenInfo:
        return look_ahead(info, is_image.astype(jnp.int32) if spans is None else spans)


@dataclasses.dataclass(frozen=True)
class PrefixSpan(AbstractPlaces):
    """The prefix of a text, its images and its question, attends to itself in both directions, and what follows is
    causal (PaliGemma, arXiv:2407.07726, section 3.2.1). Without `spans`, a whole row is a prefix."""

    reads_ahead = True

    def describe(
        self, tokens: Tokens, is_image: Bool[Array, "batch seq"], images: Any, info: TokenInfo, spans: Spans | None
    ) -> TokenInfo:
        if spans is None:
            spans = jnp.ones_like(tokens) if info.positions is None else (info.positions >= 0).astype(jnp.int32)
        return look_ahead(info, spans)


@dataclasses.dataclass(frozen=True)
class GridPlaces(AbstractPlaces):
    """Positions on three axes, of time, row and column (M-RoPE; Qwen2-VL, Wang et al., arXiv:2409.12191, section 2.1).

    A token of text has one number on all axes. An image that follows number p has its steps, rows and columns counted
    from p + 1, after `merge` x `merge` patches became one token; the text goes on after the larger of rows and columns.
    """

    merge: int
    steps_per_second: float | int | None = None
    """Number of positions of a second of film; None for one of each step (Qwen2.5-VL, arXiv:2502.13923, section
    2.1.3)."""

    def describe(
        self, tokens: Tokens, is_image: Bool[Array, "batch seq"], images: Any, info: TokenInfo, spans: Spans | None
    ) -> TokenInfo:
        info = look_ahead(info, spans)
        if not isinstance(images, PackedImages):
            return info
        if info.positions is None:
            is_real = jnp.ones_like(is_image)
        else:
            is_real = info.positions >= 0
        return dataclasses.replace(info, coordinates=self.count(is_image, is_real, images))

    def count(
        self, is_image: Bool[Array, "batch seq"], is_real: Bool[Array, "batch seq"], images: PackedImages
    ) -> Float[Array, "batch seq 3"]:
        """Return the position of each token on the three axes."""
        grids = images.grids // jnp.asarray([1, self.merge, self.merge])
        ends = jnp.cumsum(grids.prod(-1), axis=1)
        advance = grids[..., 1:].max(-1)
        order = jnp.cumsum(is_image, axis=1) - 1  # of image tokens
        texts = jnp.cumsum(is_real & ~is_image, axis=1)
        seen = jnp.cumsum(is_image, axis=1)[..., None] >= ends[:, None, :]
        after = jnp.where(seen, advance[:, None, :], 0).sum(-1)  # of whole images so far
        text = texts - 1 + after
        number = jnp.minimum((order[..., None] >= ends[:, None, :]).sum(-1), ends.shape[1] - 1)
        take = lambda x: jnp.take_along_axis(x, number, axis=1)
        before = jnp.cumsum(advance, axis=1) - advance
        start = texts + take(before)
        place = order - take(ends - grids.prod(-1))
        rows, columns = (jnp.maximum(take(grids[..., axis]), 1) for axis in (1, 2))
        step = place // (rows * columns)
        if self.steps_per_second is not None:
            seconds = 1.0 if images.seconds is None else take(images.seconds)
            step = jnp.floor(step * seconds * self.steps_per_second)
        axes = [step, place // columns % rows, place % columns]
        image = jnp.stack([start + axis for axis in axes], axis=-1)
        return jnp.where(is_image[..., None], image, text[..., None]).astype(jnp.float32)


def look_ahead(info: TokenInfo, spans: Spans | None) -> TokenInfo:
    """Return `info` in which each token attends to the later ones of its span."""
    if spans is None:
        return info
    return dataclasses.replace(info, lookahead=count_lookahead(spans))
