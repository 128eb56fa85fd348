"""Softmax attention within chunks of positions."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from zoo.ops.attention import ATTENTION, AttentionMask
from zoo.ops.rotary import Rotary
from zoo.parallel import implementation_option, num_shards
from zoo.shapes import HeadVectors, HiddenStates, KVHeads, ResidualStream, SegmentIds

from .abstract import AbstractLinear, AbstractMixer, AbstractNorm
from .attention import (
    attend,
    check_attention_sizes,
    make_cache,
    make_projections,
    rotate,
    select_kv_heads,
    split_heads,
    update_cache,
)
from .cached_attention import cached_attention
from .kv_cache import KeyValueCache, require_positions
from .query_scale import QueryScale, scale_queries
from .rotary import find_max_row_length, rope_stable_length
from .token_info import TokenInfo, token_positions


class ChunkedAttention(AbstractMixer):
    """Causal grouped-query attention within chunks of positions (Meta, "Llama 4", 2025):

        q, k = norm(rotate(W x)),    v = W_v x
        y = W_out softmax(s(position) q kᵀ scale + mask) v

    A token attends to itself and those before it whose position // `chunk` is its own. Layers of a model that see all
    tokens have no `chunk`, and may scale their queries by position, with a `query_scale` s. The QK norm, over head_dim,
    follows RoPE.

    A chunk is a segment of its own: the number of the chunk is folded into the segment ids of this layer, so that every
    implementation of attention and form of `context` computes it, packed sequences included. A KV cache holds one
    chunk. Meshes are those of `zoo.layers.Attention`.
    """

    shards_sequence = True
    shards_state = True

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear
    query_norm: AbstractNorm | None
    key_norm: AbstractNorm | None

    head_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Query heads per KV head."""
    rotary: Rotary | None = eqx.field(static=True)
    chunk: int | None = eqx.field(static=True)
    query_scale: QueryScale | None = eqx.field(static=True)
    implementation: str | Callable = implementation_option(ATTENTION)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary: Rotary | None = None,
        qk_norm: Callable[[], AbstractNorm] | None = None,
        chunk: int | None = None,
        query_scale: QueryScale | None = None,
        bias: bool = False,
        out_bias: bool = False,
        implementation: str | Callable = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `chunk`: tokens of a chunk; None attends to all tokens.
        - `query_scale`: scale of queries by position.

        Other options are those of `zoo.layers.Attention`. **Raises** `ValueError` as it does, and for an empty chunk.
        """
        if chunk is not None and chunk < 1:
            raise ValueError(f"a chunk holds at least 1 token, not {chunk}")
        kv_heads, head_dim = check_attention_sizes(embed, heads, kv_heads, head_dim)
        options = {"bias": bias, "out_bias": out_bias, "out_scale": out_scale}
        projections = make_projections(embed, heads, kv_heads, head_dim, key=key, **options)
        self.query, self.key, self.value, self.out = projections
        self.query_norm = None if qk_norm is None else qk_norm()
        self.key_norm = None if qk_norm is None else qk_norm()
        self.head_dim, self.group, self.rotary = head_dim, heads // kv_heads, rotary
        self.chunk, self.query_scale, self.implementation = chunk, query_scale, implementation

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None = None
    ) -> tuple[ResidualStream, KeyValueCache | None]:
        """With a KV cache as `state`, tokens follow those of the cache, at `info.positions`.

        **Raises** `ValueError` for a cache without positions.
        """
        query, key, value = (split_heads(linear(x), self.head_dim) for linear in (self.query, self.key, self.value))
        query, key = rotate(query, key, self.rotary, x, info, state)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.query_scale is not None:
            query = scale_queries(query, self.query_scale, x, info)
        if state is not None and self.chunk is not None:
            mixed, state = self._attend_to_cached_chunk(query, key, value, info, state)
        else:
            info = info if self.chunk is None else TokenInfo(info.positions, fold_chunks(x, info, self.chunk))
            options = {"group": self.group, "implementation": self.implementation}
            mixed, state = attend(query, key, value, info, state, **options)
        return self.out(mixed.reshape(*mixed.shape[:2], -1)), state

    def _attend_to_cached_chunk(
        self,
        query: HeadVectors,
        key: KVHeads,
        value: KVHeads,
        info: TokenInfo,
        state: KeyValueCache,
    ) -> tuple[HeadVectors, KeyValueCache]:
        """Attend to those tokens of a cache that are in the chunk of the query; return the updated cache as well."""
        require_positions(info, state)
        assert info.positions is not None and self.chunk is not None
        key, value, key_positions, state = update_cache(state, key, value, info.positions, self.chunk)
        key, value = (select_kv_heads(x, query, self.group) for x in (key, value))
        chunks = info.positions // self.chunk, key_positions // self.chunk
        mask = AttentionMask(True, None, *chunks, info.positions, key_positions)
        return cached_attention(query, key, value, mask, implementation=self.implementation), state

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> KeyValueCache:
        """Return an empty KV cache for `length` tokens, of at most `chunk` slots."""
        kv_heads = self.key.out_size // self.head_dim
        return make_cache(batch, length, kv_heads, self.head_dim, dtype, window=self.chunk)

    @property
    def rope_stable_length(self) -> int | None:
        return rope_stable_length(self.rotary)


def fold_chunks(x: HiddenStates, info: TokenInfo, chunk: int) -> SegmentIds | None:
    """Return segment ids by which a token's segment is its chunk of `chunk` positions in its document; None if every
    row is one chunk."""
    seq = x.shape[1]
    if info.positions is None and seq * num_shards(x, "seq") <= chunk:
        return info.segment_ids
    numbers: Int[Array, "batch seq"] = jnp.broadcast_to(token_positions(x, info) // chunk, (x.shape[0], seq))
    if info.segment_ids is None:
        return numbers
    return info.segment_ids * (find_max_row_length(x, info) // chunk + 1) + numbers
