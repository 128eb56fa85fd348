"""Mixture of block attention: each query attends to its own block of keys and to the blocks that it likes best."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Key

from zoo.ops.attention import AttentionMask
from zoo.ops.attention.block_selection import average_blocks, place_in_blocks, select_blocks, select_keys
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim, num_shards
from zoo.shapes import HeadVectors, HiddenStates, KVHeads, Positions, ResidualStream, ValueHeads

from ..abstract import AbstractMixer, AbstractNorm
from ..heads import select_kv_heads
from ..kv_cache import mark_overfull, require_positions
from ..token_info import TokenInfo
from .attention import Attention
from .cached import cached_attention
from .context import causal_attention, gather_keys
from .key_blocks import BlockCache, BlockKeys, check_sizes, gather_choosers, split_sequence
from .tapped import VALUE_NAMES, select_attention, tap_heads


class MixtureOfBlockAttention(AbstractMixer):
    """Mixture of block attention (MoBA; Lu et al., arXiv:2502.13189, section 2.2): causal attention of each query head
    to its own block of `block` keys, and to the `top` - 1 blocks before it with the highest

        score of a block = q · mean of its keys

    with one softmax over all their keys. The choice has no gradient; of equal scores, the earlier block is chosen. The
    rest is `zoo.layers.Attention`, whose parameters it has: a model may be trained with full attention first, as in the
    paper.

    Blocks are counted from the start of a text, and begin anew in each segment of a packed row. Rows and caches of at
    most `top` blocks are attended to densely.

    This is the reference: the choice is a mask of every key, heads n T bytes per row for n queries and T keys. It saves
    neither memory nor FLOPs over dense attention, and needs an implementation with all scores in memory.

    The cache holds the mean of every whole block too (`BlockCache`). Supported meshes are as in `zoo.layers.Attention`;
    where `context` shards the sequence, only `Layout(context="gathered")` computes it.
    """

    shards_sequence = True
    shards_state = True
    value_names = VALUE_NAMES

    attention: Attention
    norm: AbstractNorm | None

    block: int = eqx.field(static=True)
    """Tokens of a block."""
    top: int = eqx.field(static=True)
    """Blocks that a query attends to at most, its own among them."""

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        block: int,
        top: int,
        norm: Callable[..., AbstractNorm] | None = None,
        key: Key[Array, ""],
        **options: Any,
    ):
        """- `block`: tokens of a block.
        - `top`: blocks that a query attends to at most, its own among them.
        - `norm`: factory of a norm over the values of a head, called with their number and `features=`.

        Other options are as in `zoo.layers.Attention`, without a window. **Raises** `ValueError` as it does, for a
        `block` or `top` below 1, and for a window.
        """
        check_sizes(block=block, top=top)
        if options.get("window") is not None:
            raise ValueError(f"window={options['window']}: a query attends to blocks, and blocks have no window")
        self.attention = Attention(embed, heads, **options, key=key)
        self.norm = None if norm is None else norm(self.attention.head_dim, features=Dim("head_dim"))
        self.block = block
        self.top = top

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: BlockCache | None = None
    ) -> tuple[ResidualStream, BlockCache | None]:
        """With a cache as `state`, the new tokens follow the cached ones, at `info.positions`.

        **Raises** `ValueError` for a cache without positions.
        """
        require_positions(info, state)
        query, key, value = self.attention.project(x, info, None if state is None else state.tokens)
        query, key, value = map(checkpoint_name, tap_heads(query, key, value), ("query", "key", "value"))
        if state is None:
            mixed = self.attend_to_sequence(query, key, value, info)
        else:
            assert info.positions is not None  # see require_positions
            state = state.write(key, value, info.positions, self.block, average_blocks)
            mixed = self.attend_to_cache(query, state, info.positions)
        mixed = checkpoint_name(mixed, "attention")
        if self.norm is not None:
            mixed = self.norm(mixed)
        return self.attention.out(mixed.reshape(*mixed.shape[:2], -1)), state

    def attend_to_sequence(self, query: HeadVectors, key: KVHeads, value: ValueHeads, info: TokenInfo) -> HeadVectors:
        """Attend within the sequence."""
        key, value = (select_kv_heads(x, query, self.attention.group) for x in (key, value))
        if query.shape[1] * num_shards(query, "seq") <= self.top * self.block:
            return causal_attention(query, (key, value), info.segment_ids, **self._options())
        implementation = self.attention.implementation
        (key, value), mask = gather_keys(query, (key, value), info.segment_ids, implementation=implementation)
        (blocks,), key_places, places = split_sequence((key,), query, mask, self.block)
        chosen = select_blocks(query, average_blocks(blocks), self.top, places)
        mask = dataclasses.replace(mask, selected=select_keys(chosen, key_places.own))
        return select_attention()(query, key, value, mask, **self._options())

    def attend_to_cache(self, query: HeadVectors, state: BlockCache, positions: Positions) -> HeadVectors:
        """Attend to the tokens of a cache, the new ones among them."""
        tokens = state.tokens
        heads = *tokens.read()[:2], state.key.swapaxes(1, 2)
        key, value, block_keys = (select_kv_heads(x, query, self.attention.group) for x in heads)
        selected = self._select_slots(query, block_keys, state, positions)
        mask = AttentionMask(True, None, None, None, positions, tokens.positions, selected)
        return mark_overfull(cached_attention(query, key, value, mask, **self._options()), tokens)

    def _select_slots(
        self, query: HeadVectors, block_keys: BlockKeys, state: BlockCache, positions: Positions
    ) -> Bool[Array, "batch heads _ slots"] | None:
        """Return the slots that each new token attends to; None if these are all."""
        if block_keys.shape[1] <= self.top:
            return None
        query, positions = gather_choosers(query, positions, state.tokens)
        chosen = select_blocks(query, block_keys, self.top, place_in_blocks(positions, self.block))
        return select_keys(chosen, state.tokens.positions // self.block)

    def _options(self) -> dict[str, Any]:
        return {"implementation": self.attention.implementation, **self.attention.score_options()}

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> BlockCache:
        """Return an empty cache for `length` tokens."""
        attention = self.attention
        kv_heads = attention.key.out_size // attention.head_dim
        return BlockCache.empty(batch, kv_heads, attention.head_dim, dtype, length, self.block)

    @property
    def rotary(self) -> Rotary | None:
        """RoPE of queries and keys."""
        return self.attention.rotary

    @property
    def rope_switch_length(self) -> int | None:
        return self.attention.rope_switch_length
