"""Attention to chosen blocks of keys: the blocks of a text, the choice of each query, and the keys that it means.

A text is cut into blocks of `size` tokens from its start, and the blocks of a packed row have consecutive numbers. The
last block of a text, if it is not whole, has the number of the next text's first block: their segments differ, and no
query sees both. A row of `seq` tokens thus has at most ceil(seq / size) numbers, with any number of texts in it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from zoo.ops.matmul import einsum_fp32_accum
from zoo.ops.recurrence.chunks import find_segment_starts

from .grouped import group_size
from .mask import AttentionMask
from .reference import attention_probabilities


class BlockPlaces(NamedTuple):
    """The blocks that tokens are in, by number."""

    own: Int[Array, "rows seq"]
    """The block of a token."""
    first: Int[Array, "rows seq"]
    """The first block of its text."""
    is_last: Bool[Array, "rows seq"]
    """True for the last token of a whole block."""

    def see_whole(self, blocks: int) -> Bool[Array, "rows seq {blocks}"]:
        """Return True for the blocks of a token's text that end at or before it."""
        return self._follow(blocks) & (jnp.arange(blocks) < (self.own + self.is_last)[..., None])

    def see_earlier(self, blocks: int) -> Bool[Array, "rows seq {blocks}"]:
        """Return True for the blocks of a token's text before its own."""
        return self._follow(blocks) & (jnp.arange(blocks) < self.own[..., None])

    def _follow(self, blocks: int) -> Bool[Array, "rows seq {blocks}"]:
        return jnp.arange(blocks) >= self.first[..., None]


def place_in_blocks(positions: Int[Array, "rows seq"], size: int) -> BlockPlaces:
    """Return the blocks of tokens at positions in one text per row; padding at negative positions is in none."""
    is_last = (positions >= 0) & (positions % size == size - 1)
    return BlockPlaces(positions // size, jnp.zeros_like(positions), is_last)


def place_packed_in_blocks(segment_ids: Int[Array, "batch seq"], size: int) -> BlockPlaces:
    """Return the blocks of tokens in packed rows, where blocks begin anew in each segment."""
    index = jnp.arange(segment_ids.shape[1])
    start = lax.cummax(jnp.where(find_segment_starts(segment_ids), index, 0), axis=1)
    is_last = (index - start) % size == size - 1
    own = jnp.cumsum(is_last, axis=1, dtype=jnp.int32) - is_last
    return BlockPlaces(own, jnp.take_along_axis(own, start, axis=1), is_last)


def split_into_blocks(
    x: Shaped[Array, "batch seq *dims"], size: int, places: BlockPlaces | None = None
) -> Shaped[Array, "batch blocks {size} *dims"]:
    """Return the tokens of each block, by number: of packed rows with `places`, else of one text per row. The tokens of
    a block that is not whole are meaningless."""
    blocks = -(-x.shape[1] // size)
    if places is None:
        x = jnp.pad(x, ((0, 0), (0, blocks * size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(x.shape[0], blocks, size, *x.shape[2:])
    index = jnp.arange(x.shape[1])
    ends = jnp.sort(jnp.where(places.is_last, index, x.shape[1]), axis=1)[:, :blocks]
    tokens = jnp.clip(ends[..., None] - jnp.arange(size)[::-1], 0, x.shape[1] - 1)
    chosen = jnp.take_along_axis(x, tokens.reshape(x.shape[0], -1, *[1] * (x.ndim - 2)), axis=1)
    return chosen.reshape(*tokens.shape, *x.shape[2:])


def average_blocks(keys: Float[Array, "batch blocks size *dims"]) -> Float[Array, "batch blocks *dims"]:
    """Return the mean key of each block, summed in float32."""
    return keys.astype(jnp.float32).mean(2).astype(keys.dtype)


def score_products(
    query: Float[Array, "batch query_seq heads head_dim"],
    block_keys: Float[Array, "batch blocks kv_heads head_dim"],
    places: BlockPlaces,
) -> Float[Array, "batch heads query_seq blocks"]:
    """Return the product of each query and each block key: query heads choose by themselves (MoBA, arXiv:2502.13189,
    section 2.2)."""
    keys = jnp.repeat(block_keys, group_size(query, block_keys), axis=2)
    return einsum_fp32_accum("bqhd,bkhd->bhqk", query, keys, dtype=jnp.float32)


def score_probabilities(
    query: Float[Array, "batch query_seq heads head_dim"],
    block_keys: Float[Array, "batch blocks kv_heads head_dim"],
    places: BlockPlaces,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "batch kv_heads query_seq blocks"]:
    """Return the attention probabilities of the block keys, of whole blocks, summed over the query heads that share a
    key head: these choose together (NSA, arXiv:2502.11089, section 3.3.2)."""
    kv_heads = block_keys.shape[2]
    mask = AttentionMask(False, selected=_broadcast_rows(places.see_whole(block_keys.shape[1]), query))
    probabilities = attention_probabilities(query, block_keys, mask, scale=scale, soft_cap=soft_cap)
    return probabilities.reshape(query.shape[0], kv_heads, -1, *probabilities.shape[2:]).sum(2)


def select_blocks(
    query: Float[Array, "batch query_seq heads head_dim"],
    block_keys: Float[Array, "batch blocks kv_heads head_dim"],
    top: int,
    places: BlockPlaces,
    *,
    score: Callable[..., Float[Array, "batch groups query_seq blocks"]] = score_products,
) -> Bool[Array, "batch groups query_seq blocks"]:
    """Return True at the blocks that each query attends to: its own, and the `top` - 1 blocks before it, in its text,
    with the highest scores. Of equal scores, the earlier block is chosen.

    - `places`: the blocks of the queries.
    - `score`: function `(query, block_keys, places) -> scores`, of each query head or of groups of them:
      `score_products` or `score_probabilities`. Float32.

    The choice has no gradient.
    """
    blocks = block_keys.shape[1]
    query, block_keys = lax.stop_gradient((query, block_keys))
    scores = score(query, block_keys, places)
    earlier = _broadcast_rows(places.see_earlier(blocks), query)[:, None]
    own = (jnp.arange(blocks) == places.own[..., None])[:, None]
    _, best = lax.top_k(jnp.where(earlier, scores, -jnp.inf), min(top - 1, blocks))
    is_best = jax.nn.one_hot(best, blocks, dtype=bool).any(-2)
    return (is_best & earlier) | own


def select_keys(
    chosen: Bool[Array, "batch groups query_seq blocks"], key_blocks: Int[Array, "rows key_seq"]
) -> Bool[Array, "batch groups query_seq key_seq"]:
    """Return the keys that are in chosen blocks, for `AttentionMask.selected`; causality and segments mask the rest."""
    index = jnp.broadcast_to(key_blocks, (chosen.shape[0], key_blocks.shape[1]))[:, None, None]
    return jnp.take_along_axis(chosen, index, axis=3, mode="clip")


def _broadcast_rows(mask: Bool[Array, "rows seq blocks"], query: Array) -> Bool[Array, "batch seq blocks"]:
    return jnp.broadcast_to(mask, (query.shape[0], *mask.shape[1:]))
