"""The attention mask: causality, windows, blocks, positions and segments, as rules that implementations read."""

import dataclasses
import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASK_VALUE = -1e30
"""Score of a masked key: finite, so that the softmax of a fully masked query is finite."""


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """An attention mask, described by rules: a query attends to the keys that all rules allow.

    - Positions default to the order in the arrays. A key at a negative position is masked: an empty slot of a KV cache,
      or padding.
    - `causal`: causal mask, key_position <= query_position.
    - `window`: sliding-window attention, query_position - key_position < window; if not causal,
      |query_position - key_position| < window.
    - `block`: block-causal mask (block diffusion, Arriola et al., arXiv:2503.09573, section 3.2), a causal mask of
      blocks: a query attends to all keys of its own block of `block` positions, and of earlier blocks. The last
      position of its block replaces the position of a query in both rules above.
    - `lookahead`: the number of later positions that each query attends to as well, such as the rest of its image (a
      prefix, Liu et al., arXiv:1801.10198, section 4.2.1; Gemma 3, arXiv:2503.19786, section 2). A window is counted
      from the query itself.
    - Segments (packed sequences): only tokens with equal ids attend to each other.
    - `selected`: the keys that each query may see at most, such as the top-k of an indexer (sparse attention). With a
      dim of groups after the batch, each group of query heads has its own selection: one group for all heads, one per
      key head, or one per query head. Only implementations with all scores in memory take it.

    **Raises** `ValueError` where positions or segments are given for one side only, for a window or a block below 1,
    for blocks of a mask that is not causal, for a window shorter than a block, and for `lookahead` without positions or
    of a mask that is not causal.
    """

    causal: bool
    window: int | None = None
    query_segments: Int[Array, "batch query_seq"] | None = None
    key_segments: Int[Array, "batch key_seq"] | None = None
    query_positions: Int[Array, "batch query_seq"] | None = None
    key_positions: Int[Array, "batch key_seq"] | None = None
    selected: Bool[Array, "batch *groups _ _"] | None = None
    block: int | None = dataclasses.field(default=None, kw_only=True)
    lookahead: Int[Array, "batch query_seq"] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        if (self.query_positions is None) != (self.key_positions is None):
            raise ValueError("attention: give positions for queries and keys, or for neither.")
        if (self.query_segments is None) != (self.key_segments is None):
            raise ValueError("attention: give segments for queries and keys, or for neither.")
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"attention: window is {self.window}; a query attends at least to itself, so it is at least 1."
            )
        if self.lookahead is not None and (self.query_positions is None or not self.causal):
            raise ValueError("attention: lookahead counts from positions, in a causal mask: give both.")
        if self.block is None:
            return
        if self.block < 1:
            raise ValueError(f"attention: block is {self.block}; a query is in its own block, so it is at least 1.")
        if not self.causal:
            raise ValueError(f"attention: block={self.block} is a causal mask of blocks, and causal is False.")
        if self.window is not None and self.window < self.block:
            raise ValueError(
                f"attention: a window of {self.window} is shorter than a block of {self.block}, all of which a query "
                f"attends to. Use a window of at least {self.block}."
            )

    @property
    def is_structural(self) -> bool:
        """Return True if the mask depends only on causality and the window, and so is the same for all rows."""
        has_arrays = any(x is not None for x in (self.query_positions, self.query_segments, self.selected))
        return not has_arrays and self.block is None

    def find_positions(
        self, query_seq: int, key_seq: int
    ) -> tuple[Int[Array, "rows query_seq"], Int[Array, "rows key_seq"]]:
        """Return the positions of queries and keys, by default their order in the arrays, as one row. With blocks, a
        query has the last position of its block.

        **Raises** `ValueError` if causality or a window needs positions: query_seq and key_seq differ and there are
        none.
        """
        if self.query_positions is not None and self.key_positions is not None:
            queries = self.query_positions
            keys = self.key_positions
        elif query_seq == key_seq or (not self.causal and self.window is None):
            queries = jnp.arange(query_seq)[None]
            keys = jnp.arange(key_seq)[None]
        else:
            raise ValueError(
                f"attention: {query_seq} queries and {key_seq} keys have no common order in time. Give positions."
            )
        if self.block is not None:
            queries = queries + count_block_ahead(queries, self.block)
        return queries, keys

    def materialize(self, query_seq: int, key_seq: int) -> Bool[Array, "rows *groups query_seq key_seq"] | None:
        """Return the boolean mask, True where a query attends to a key, or None if nothing is masked.

        `rows` is batch, or 1 if all rows have the same mask. There are groups if the selection has them.

        **Raises** `ValueError` as `find_positions` does.
        """
        query_positions, key_positions = self.find_positions(query_seq, key_seq)
        rules = []
        if self.key_positions is not None:
            rules.append(key_positions[:, None, :] >= 0)
        age = query_positions[:, :, None] - key_positions[:, None, :]
        if self.lookahead is not None:
            rules.append(age + self.lookahead[:, :, None] >= 0)
        elif self.causal:
            rules.append(age >= 0)
        if self.window is not None:
            distance = age if self.causal else jnp.abs(age)
            rules.append(distance < self.window)
        if self.query_segments is not None and self.key_segments is not None:
            rules.append(self.query_segments[:, :, None] == self.key_segments[:, None, :])
        if self.selected is not None:
            if self.selected.ndim == 4:
                rules = [rule[:, None] for rule in rules]
            rules.append(self.selected)
        if not rules:
            return None
        mask = functools.reduce(jnp.logical_and, rules)
        return jnp.broadcast_to(mask, (*mask.shape[:-2], query_seq, key_seq))


def count_block_ahead(positions: Int[Array, "*batch seq"], block: int) -> Int[Array, "*batch seq"]:
    """Return the number of positions after each one in its block. Padding, at position -1, is the last of a block."""
    return block - 1 - positions % block


def zero_masked_queries(output: Float[Array, "..."], mask: Bool[Array, "..."] | None) -> Float[Array, "..."]:
    """Zero the output of fully masked queries, whose softmax is uniform and meaningless."""
    if mask is None:
        return output
    sees_keys = mask_heads(mask, output.shape[2]).any(axis=-1)
    return jnp.where(sees_keys.swapaxes(1, 2)[..., None], output, 0)


def mask_heads(mask: Bool[Array, "rows *groups queries keys"], heads: int) -> Bool[Array, "rows _ queries keys"]:
    """Return the mask of each query head, or one for all of them.

    **Raises** `ValueError` for groups that the heads do not divide evenly over.
    """
    if mask.ndim == 3:
        return mask[:, None]
    groups = mask.shape[1]
    if heads % groups:
        raise ValueError(
            f"attention: {heads} query heads do not divide evenly over {groups} groups with own selections."
        )
    if groups == 1:
        return mask
    return jnp.repeat(mask, heads // groups, axis=1)
