"""Blocks of queries and keys: the attention mask of a pair of blocks, and the pairs that are skipped."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from .mask import AttentionMask


class Marks(NamedTuple):
    """The positions and segments of tokens, which the attention mask compares, and how far queries look ahead."""

    positions: Int[Array, "..."]
    segments: Int[Array, "..."] | None
    lookahead: Int[Array, "..."] | None = None


def balance_blocks(seq: int, block: int) -> int:
    """Return the size of the blocks of at most `block` tokens, a multiple of 16, that pad a sequence least."""
    if seq <= 16:
        return seq
    count = -(-seq // block)
    return -(-seq // count // 16) * 16


def mark_blocks(
    attention_mask: AttentionMask, batch: int, lengths: tuple[int, int], sizes: tuple[int, int]
) -> tuple[Marks, Marks]:
    """Return the marks of queries and of keys, [batch, blocks, size]. Keys that pad the last block are masked."""
    places = attention_mask.find_positions(*lengths)

    def split(x: Array, size: int, **padding: Any) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), **padding).reshape(x.shape[0], -1, size)
        return jnp.broadcast_to(x, (batch, *x.shape[1:]))

    def split_optional(x: Array | None, size: int) -> Array | None:
        if x is None:
            return None
        return split(x, size, mode="edge")

    queries = split(places[0], sizes[0], mode="edge")
    keys = split(places[1], sizes[1], constant_values=-1)
    lookahead = split_optional(attention_mask.lookahead, sizes[0])
    return (
        Marks(queries, split_optional(attention_mask.query_segments, sizes[0]), lookahead),
        Marks(keys, split_optional(attention_mask.key_segments, sizes[1])),
    )


def mask_blocks(causal: bool, window: int | None, queries: Marks, keys: Marks) -> Bool[Array, "query_block key_block"]:
    """Return the attention mask of one block of queries and one of keys."""
    marks = (queries.segments, keys.segments, queries.positions, keys.positions, queries.lookahead)
    *row, lookahead = jax.tree.map(lambda x: x[None], marks)
    rules = AttentionMask(causal, window, *row, lookahead=lookahead)
    mask = rules.materialize(len(queries.positions), len(keys.positions))
    assert mask is not None  # there are positions
    return mask[0]


def find_ranges(
    causal: bool, window: int | None, queries: Marks, keys: Marks, *, of_keys: bool = False
) -> tuple[Int[Array, "batch blocks"], Int[Array, "batch blocks"]]:
    """Return for each block of queries the first block of keys that it may attend to, and the one after the last. With
    `of_keys`, return for each block of keys the range of query blocks that may attend to it. An empty range is (number
    of blocks, 0).

    Blocks are compared by the bounds of their marks, one block with all others at a time: the memory is linear.
    """
    query_bounds = _bound(queries, queries.positions.min(-1))
    key_bounds = _bound(keys, _find_lowest_unmasked(keys))
    outer, inner = (key_bounds, query_bounds) if of_keys else (query_bounds, key_bounds)

    def find_range(block: _Bounds) -> tuple[Array, Array]:
        pair = (inner, block) if of_keys else (block, inner)
        visible = jnp.broadcast_to(_may_see(causal, window, *pair), inner.low.shape)
        index = jnp.arange(visible.shape[1])
        first = jnp.where(visible, index, visible.shape[1]).min(1)
        return first, jnp.where(visible, index + 1, 0).max(1)

    first, end = lax.map(find_range, jax.tree.map(lambda x: x.T[:, :, None], outer))
    return first.T, end.T


class _Bounds(NamedTuple):
    """Lowest and highest marks of blocks. The highest position of queries is the last that one of them looks at."""

    low: Int[Array, "..."]
    high: Int[Array, "..."]
    segments: tuple[Array, Array] | None


def _bound(marks: Marks, low: Int[Array, "batch blocks"]) -> _Bounds:
    """Return the bounds of each block, given its lowest positions."""
    positions, segments, lookahead = marks
    segment_bounds = None if segments is None else (segments.min(-1), segments.max(-1))
    last = positions if lookahead is None else positions + lookahead
    return _Bounds(low, last.max(-1), segment_bounds)


def _find_lowest_unmasked(keys: Marks) -> Int[Array, "batch blocks"]:
    """Return the lowest position of the keys of each block, except masked keys."""
    return jnp.where(keys.positions < 0, jnp.iinfo(keys.positions.dtype).max, keys.positions).min(-1)


def _may_see(causal: bool, window: int | None, queries: _Bounds, keys: _Bounds) -> Bool[Array, "..."]:
    """Return False where no query sees a key, as far as the bounds tell."""
    visible = keys.high >= 0
    if causal:
        visible &= keys.low <= queries.high
    if window is not None:
        visible &= queries.low < window + keys.high
        visible &= causal or keys.low - window < queries.high
    if queries.segments is not None and keys.segments is not None:
        visible &= (keys.segments[0] <= queries.segments[1]) & (queries.segments[0] <= keys.segments[1])
    return visible
