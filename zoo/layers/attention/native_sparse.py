"""Native sparse attention: compressed blocks of keys, the blocks that a group of heads chooses, and a window."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Key

from zoo.ops.attention import AttentionMask, attention
from zoo.ops.attention.block_selection import (
    BlockPlaces,
    average_blocks,
    place_in_blocks,
    score_probabilities,
    select_blocks,
    select_keys,
)
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim, Module, all_gather
from zoo.parallel.collectives import shard_offset
from zoo.shapes import HeadVectors, HiddenStates, KVHeads, Positions, ResidualStream, ValueHeads

from ..abstract import AbstractLinear, AbstractMixer
from ..heads import select_kv_heads, split_heads
from ..kv_cache import mark_overfull, require_positions
from ..linear import Linear, truncated_normal
from ..token_info import TokenInfo
from .attention import Attention
from .cached import cached_attention
from .context import gather_keys
from .key_blocks import BlockCache, BlockKeys, check_sizes, gather_choosers, split_sequence
from .tapped import tap_heads

BRANCHES = 3
"""Gates of a head: of the compressed, the selected and the window branch."""


class BlockCompression(Module):
    """One key, or value, of the tokens x_1 ... x_n of a block, by an MLP that all heads share:

        W_down gelu(W_up [x_1 + p_1, ..., x_n + p_n])

    with a learned vector p for each place in a block.
    """

    positions: Float[Array, "chunk head_dim"]
    up: AbstractLinear
    down: AbstractLinear

    def __init__(self, size: int, head_dim: int, *, key: Key[Array, ""]):
        """Make a compression of blocks of `size` tokens, with `head_dim` hidden features."""
        position_key, up_key, down_key = jax.random.split(key, 3)
        hidden = Dim("features")
        self.positions = truncated_normal(position_key, (size, head_dim), 0.02)
        self.up = Linear(size * head_dim, head_dim, in_=Dim("chunk", head_dim), out=hidden, key=up_key)
        self.down = Linear(head_dim, head_dim, in_=hidden, out=Dim("head_dim"), key=down_key)

    def __call__(self, x: Float[Array, "batch blocks size kv_heads _"]) -> Float[Array, "batch blocks kv_heads _"]:
        placed = (x + self.positions[:, None]).swapaxes(2, 3)
        return self.down(jax.nn.gelu(self.up(placed.reshape(*placed.shape[:3], -1))))


class NativeSparseAttention(AbstractMixer):
    """Native sparse attention (NSA; Yuan et al., arXiv:2502.11089, section 3): causal attention in three branches, of
    which each head has a gate,

        g = sigmoid(W_gate x)
        y = W_out (g_1 compressed + g_2 selected + g_3 window)

    - compressed: to one key and value of each block of `block` tokens that ends at or before the query
      (`BlockCompression`); zeros before there is one.
    - selected: to the tokens of the query's own block, and of the `top` - 1 blocks before it with the highest
      probabilities of the compressed branch, summed over the query heads that share a key head. These choose together.
      The choice has no gradient; of equal blocks, the earlier one is chosen.
    - window: to the last `window` tokens.

    Projections, RoPE and the other options are of `zoo.layers.Attention`. Three things differ from the paper: the
    branches share keys and values; compressed blocks do not overlap, and are those that are selected; and the first
    block is chosen by its score like any other, unless `keep_ends`, with which the first block and the one before the
    query's own are always chosen.

    Blocks are counted from the start of a text, and begin anew in each segment of a packed row.

    This is the reference: the choice is a mask of every key, kv_heads n T bytes per row for n queries and T keys. The
    selected branch costs as much as dense attention, and needs an implementation with all scores in memory. One
    `implementation` serves all branches.

    The cache holds the compressed keys and values too (`BlockCache`). Supported meshes are as in
    `zoo.layers.Attention`; where `context` shards the sequence, only `Layout(context="gathered")` computes it.
    """

    shards_sequence = True
    shards_state = True
    value_names = ("queries", "keys", "values")

    attention: Attention
    gate: AbstractLinear
    compress_key: BlockCompression | None
    """None for the mean."""
    compress_value: BlockCompression | None

    block: int = eqx.field(static=True)
    """Tokens of a block."""
    top: int = eqx.field(static=True)
    """Blocks that the selected branch attends to at most, the query's own among them."""
    window: int = eqx.field(static=True)
    keep_ends: bool = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        block: int,
        top: int,
        window: int,
        average: bool = False,
        keep_ends: bool = False,
        key: Key[Array, ""],
        **options: Any,
    ):
        """- `block`: tokens of a block.
        - `top`: blocks that the selected branch attends to at most, the query's own among them.
        - `window`: tokens of the window, the query's own among them.
        - `average`: compress a block to the means of its keys and values, and not by an MLP.
        - `keep_ends`: always choose the first block and the one before the query's own, too. `top` is then at least 3.

        Other options are as in `zoo.layers.Attention`, without sinks. **Raises** `ValueError` as it does, for a
        `block`, `top` or `window` below 1, and for sinks.
        """
        check_sizes(block=block, top=top, window=window)
        if keep_ends and top < 3:
            raise ValueError(f"top={top}: keep_ends chooses three blocks, the first, the last and the query's own")
        if options.get("sinks"):
            raise ValueError("sinks=True: native sparse attention has three softmaxes, and no sinks in any")
        attention_key, gate_key, key_key, value_key = jax.random.split(key, 4)
        self.attention = Attention(embed, heads, **options, key=attention_key)
        gates = Dim("heads", BRANCHES)
        self.gate = Linear(embed, heads * BRANCHES, in_=Dim("embed"), out=gates, key=gate_key)
        head_dim = self.attention.head_dim
        self.compress_key = None if average else BlockCompression(block, head_dim, key=key_key)
        self.compress_value = None if average else BlockCompression(block, head_dim, key=value_key)
        self.block = block
        self.top = top
        self.window = window
        self.keep_ends = keep_ends

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: BlockCache | None = None
    ) -> tuple[ResidualStream, BlockCache | None]:
        """With a cache as `state`, the new tokens follow the cached ones, at `info.positions`.

        **Raises** `ValueError` for a cache without positions.
        """
        require_positions(info, state)
        query, key, value = self.attention.project(x, info, None if state is None else state.tokens)
        query, key, value = map(checkpoint_name, tap_heads(query, key, value), ("query", "key", "value"))
        gates = jax.nn.sigmoid(split_heads(self.gate(x), BRANCHES))
        if state is None:
            mixed = self._attend_to_sequence(query, key, value, gates, info)
        else:
            assert info.positions is not None  # see require_positions
            state = state.write(key, value, info.positions, self.block, *self._compressions())
            mixed = self._attend_to_cache(query, gates, state, info.positions)
        mixed = checkpoint_name(mixed, "attention")
        return self.attention.out(mixed.reshape(*mixed.shape[:2], -1)), state

    def _attend_to_sequence(
        self, query: HeadVectors, key: KVHeads, value: ValueHeads, gates: HeadVectors, info: TokenInfo
    ) -> HeadVectors:
        key, value = (select_kv_heads(x, query, self.attention.group) for x in (key, value))
        implementation = self.attention.implementation
        tokens, mask = gather_keys(query, (key, value), info.segment_ids, implementation=implementation)
        (keys, values), key_places, places = split_sequence(tokens, query, mask, self.block)
        compress_key, compress_value = self._compressions()
        blocks = compress_key(keys), compress_value(values)
        chosen = self.choose_blocks(query, blocks[0], places)
        mask = dataclasses.replace(mask, selected=select_keys(chosen, key_places.own))
        return self.mix_branches(query, tokens, blocks, gates, mask, places, attention)

    def _attend_to_cache(
        self, query: HeadVectors, gates: HeadVectors, state: BlockCache, positions: Positions
    ) -> HeadVectors:
        assert state.value is not None  # see init_state
        cache = state.tokens
        heads = *cache.read()[:2], state.key.swapaxes(1, 2), state.value.swapaxes(1, 2)
        key, value, block_key, block_value = (select_kv_heads(x, query, self.attention.group) for x in heads)
        choosers, at = gather_choosers(query, positions, cache)
        chosen = self.choose_blocks(choosers, block_key, place_in_blocks(at, self.block))
        selected = select_keys(chosen, cache.positions // self.block)
        mask = AttentionMask(True, None, None, None, positions, cache.positions, selected)
        places = place_in_blocks(positions, self.block)
        blocks = block_key, block_value
        mixed = self.mix_branches(query, (key, value), blocks, gates, mask, places, cached_attention)
        return mark_overfull(mixed, cache)

    def _compressions(self) -> tuple[Callable[..., BlockKeys], Callable[..., BlockKeys]]:
        """Return the functions that make a key, and a value, of each block."""
        if self.compress_key is None or self.compress_value is None:
            return average_blocks, average_blocks
        return self.compress_key, self.compress_value

    def choose_blocks(
        self, query: HeadVectors, block_keys: BlockKeys, places: BlockPlaces
    ) -> Bool[Array, "batch kv_heads seq blocks"]:
        """Return the blocks that the query heads of each key head attend to in the selected branch."""
        return select_blocks(query, block_keys, self.top, places, score=self._score_blocks)

    def _score_blocks(
        self, query: HeadVectors, block_keys: BlockKeys, places: BlockPlaces
    ) -> Float[Array, "batch kv_heads seq blocks"]:
        scale = self.attention.scale
        scores = score_probabilities(query, block_keys, places, scale=scale, soft_cap=self.attention.soft_cap)
        if self.keep_ends:
            index = jnp.arange(scores.shape[-1])
            is_end = (index == places.first[..., None]) | (index == places.own[..., None] - 1)
            scores = jnp.where(is_end[:, None], jnp.inf, scores)
        heads = query.shape[2]
        if heads == scores.shape[1] * self.attention.group:
            return scores
        # The key head is on several devices, each with some of its query heads.
        every = all_gather(scores, "heads", axis=1)
        groups = every.reshape(every.shape[0], -1, self.attention.group // heads, *every.shape[2:]).sum(2)
        return lax.dynamic_slice_in_dim(groups, shard_offset(query, "heads", heads) // self.attention.group, 1, axis=1)

    def mix_branches(
        self,
        query: HeadVectors,
        tokens: tuple[Float[Array, "batch key_seq kv_heads _"], Float[Array, "batch key_seq kv_heads _"]],
        blocks: tuple[Float[Array, "batch blocks kv_heads _"], Float[Array, "batch blocks kv_heads _"]],
        gates: Float[Array, "batch seq heads 3"],
        mask: AttentionMask,
        places: BlockPlaces,
        attend: Callable[..., HeadVectors],
    ) -> HeadVectors:
        """Return the sum of the branches by their gates: to the keys and values of blocks, of the tokens that `mask`
        selects, and of the window. `attend` is the attention to tokens."""
        options = {"implementation": self.attention.implementation, **self.attention.score_options()}
        seen = places.see_whole(blocks[0].shape[1])
        seen = jnp.broadcast_to(seen, (query.shape[0], *seen.shape[1:]))
        compressed = attention(query, *blocks, AttentionMask(False, selected=seen), **options)
        selected = attend(query, *tokens, mask, **options)
        recent = dataclasses.replace(mask, selected=None, window=self.window)
        branches = jnp.stack([compressed, selected, attend(query, *tokens, recent, **options)], axis=-1)
        return (gates[..., None, :] * branches).sum(-1)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> BlockCache:
        """Return an empty cache for `length` tokens."""
        kv_heads = self.attention.key.out_size // self.attention.head_dim
        return BlockCache.empty(batch, kv_heads, self.attention.head_dim, dtype, length, self.block, has_values=True)

    @property
    def rotary(self) -> Rotary | None:
        """RoPE of queries and keys."""
        return self.attention.rotary

    @property
    def rope_switch_length(self) -> int | None:
        return self.attention.rope_switch_length
