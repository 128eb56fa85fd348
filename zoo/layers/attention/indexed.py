"""Attention to the blocks of tokens that an indexer selects by the mean of their keys."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Key

from zoo.ops.attention import AttentionMask
from zoo.ops.attention.block_selection import BlockPlaces, average_blocks, place_in_blocks, select_keys
from zoo.ops.attention.indexer import indexer_divergence, score_keys, select_highest
from zoo.ops.attention.reference import attention_probabilities
from zoo.ops.rotary import Rotary, apply_rotary
from zoo.ops.sectioned_rotary import SectionedRotary
from zoo.parallel import Dim, Module, all_gather, implementation_option, num_shards, reduce
from zoo.parallel.scope import asks_for, tap_value
from zoo.shapes import HeadVectors, HiddenStates, KVHeads, Positions, ResidualStream, ValueHeads

from ..abstract import AbstractLinear, AbstractMixer, AbstractNorm
from ..heads import select_kv_heads, split_heads
from ..kv_cache import KeyValueCache, mark_overfull, require_positions
from ..linear import Linear
from ..norm import RMSNorm
from ..rotary import compute_cos_sin, find_length_dependent_scaling
from ..token_info import TokenInfo
from .base import AbstractGroupedAttention
from .cached import cached_attention
from .context import causal_attention, gather_keys
from .gated import GatedAttention
from .key_blocks import BlockCache, BlockKeys, check_sizes, gather_choosers, split_sequence
from .sparse_latent import DIVERGENCE, Angles, train_if_measured
from .tapped import VALUE_NAMES, select_attention, tap_heads

_IndexQuery = Float[Array, "batch seq index_heads index_dim"]
_IndexKey = Float[Array, "batch seq one_head index_dim"]
_Scores = Float[Array, "batch seq blocks"]


class MeanKeyIndexer(Module):
    """Indexer of blocks by the mean of their keys (Qwen4-Exp; Qwen team, 2026): a query t selects the `top` blocks b
    with the highest

        I(t, b) = sum over heads h of relu(q_h(t) . k(b)) head_dim ** -0.5

        q_h = rotate(norm(W_query,h x)),    k(b) = rotate(norm(mean over tokens of b of W_key x))

    of the whole blocks up to its position. RoPE turns a key by the position of its first token. A selection has no
    gradient, and so neither have the parameters here: they are trained by `zoo.models.indexer_loss`.
    """

    query: AbstractLinear
    key: AbstractLinear
    query_norm: AbstractNorm
    key_norm: AbstractNorm

    head_dim: int = eqx.field(static=True)
    block: int = eqx.field(static=True)
    """Tokens of a block."""
    top: int = eqx.field(static=True)
    """Whole blocks that a query attends to at most."""

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        head_dim: int,
        block: int,
        top: int,
        norm: Callable[[], AbstractNorm] | None = None,
        key: Key[Array, ""],
    ):
        """`norm`: factory of the norms of queries and keys, RMSNorm by default. **Raises** `ValueError` for a size
        below 1."""
        check_sizes(heads=heads, head_dim=head_dim, block=block, top=top)
        query_key, key_key = jax.random.split(key)
        embed_dim, features = Dim("embed"), Dim("head_dim")
        self.query = Linear(embed, heads * head_dim, in_=embed_dim, out=Dim("heads", head_dim), key=query_key)
        self.key = Linear(embed, head_dim, in_=embed_dim, out=features, key=key_key)
        self.query_norm, self.key_norm = (
            RMSNorm(head_dim, features=features) if norm is None else norm() for _ in range(2)
        )
        self.head_dim = head_dim
        self.block = block
        self.top = top

    def project_query(self, x: HiddenStates, rotary: Rotary | None, cos_sin: Angles | None) -> _IndexQuery:
        """Return the queries of tokens."""
        return _rotate(split_heads(self.query(x), self.head_dim, self.query_norm), rotary, cos_sin)

    def project_key(self, x: HiddenStates) -> _IndexKey:
        """Return the keys of tokens, which blocks average."""
        return split_heads(self.key(x), self.head_dim)

    def average(self, keys: Float[Array, "batch blocks size kv_heads _"]) -> BlockKeys:
        """Return the key of each block, before RoPE."""
        return self.key_norm(average_blocks(keys))

    def score(self, query: _IndexQuery, keys: BlockKeys) -> _Scores:
        """Return the scores I of queries and blocks."""
        weights = jnp.ones(query.shape[:3], jnp.float32)
        return reduce(score_keys(query, keys[:, :, 0], weights, scale=self.head_dim**-0.5), over="heads")

    def select(self, scores: _Scores, places: BlockPlaces) -> Bool[Array, "batch seq blocks"]:
        """Return True at the blocks that each query attends to: those that it selects, and its own until it is whole.
        Of equal scores, the earlier block is selected."""
        blocks = scores.shape[-1]
        whole = places.see_whole(blocks)
        best = select_highest(lax.stop_gradient(scores), whole, min(self.top, blocks)) & whole
        own = (jnp.arange(blocks) == places.own[..., None]) & ~places.is_last[..., None]
        return best | own


class IndexedCache(Module):
    """KV cache, and the keys of the indexer: of each token, and of each whole block of tokens."""

    tokens: KeyValueCache
    index: BlockCache


class IndexedAttention(AbstractMixer):
    """Attention to the blocks that an indexer selects (Qwen4-Exp; Qwen team, 2026): causal attention in which all heads
    of a query see the tokens of the `top` whole blocks that the query selects, and the tokens of its own block until
    that is whole.

    Blocks are counted from the start of a text, and begin anew in each segment of a packed row. Rows and caches of at
    most `top` blocks are attended to densely.

    The indexer learns from its divergence from the attention to whole blocks, as in `zoo.layers.SparseLatentAttention`.
    With `dense`, the layer attends to all keys, to train a new indexer before it selects.

    This is the reference: the choice is a mask of every key, n T bytes per row for n queries and T keys. It saves
    neither memory nor FLOPs over dense attention, and needs an implementation with all scores in memory. The cache has
    the keys of the indexer too (`IndexedCache`). Supported meshes are as in `zoo.layers.Attention`, and `tensor` has to
    divide the heads of the indexer; where `context` shards the sequence, only `Layout(context="gathered")` computes it.
    """

    shards_sequence = True
    shards_state = True
    value_names = (*VALUE_NAMES, DIVERGENCE)

    attention: AbstractGroupedAttention
    indexer: MeanKeyIndexer

    dense: bool = implementation_option()
    """Attend to all keys."""

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        indexer: Callable[..., MeanKeyIndexer],
        attention: Callable[..., AbstractGroupedAttention] = GatedAttention,
        dense: bool = False,
        key: Key[Array, ""],
        **options: Any,
    ):
        """- `indexer`: factory of the indexer, called with `key=`.
        - `attention`: class of the attention, which takes the other options.
        - `dense`: attend to all keys.

        **Raises** `ValueError` as the two do, for attention in a window or within blocks, and for RoPE that depends on
        the length of the text, on the rows and columns of images, or turns more features than the indexer has.
        """
        attention_key, index_key = jax.random.split(key)
        self.attention = attention(embed, heads, **options, key=attention_key)
        self.indexer = indexer(key=index_key)
        self.dense = dense
        if self.attention.window is not None:
            raise ValueError(f"window={self.attention.window}: a query attends to blocks, and blocks have no window")
        if "block" in self.attention.score_options():
            raise ValueError("this attention has blocks of its own, and a query attends to the blocks of an indexer")
        rotary = self.attention.rotary
        if isinstance(rotary, SectionedRotary):
            raise ValueError("RoPE by rows and columns of images: keys of blocks are turned by the positions of texts")
        if rotary is not None and rotary.dim > self.indexer.head_dim:
            raise ValueError(f"RoPE turns {rotary.dim} features, and the indexer has {self.indexer.head_dim}")
        if find_length_dependent_scaling(rotary) is not None:
            raise ValueError("RoPE that depends on the length of the text would turn keys of blocks again: use another")

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: IndexedCache | None = None
    ) -> tuple[ResidualStream, IndexedCache | None]:
        """With a cache as `state`, the new tokens follow the cached ones, at `info.positions`.

        **Raises** `ValueError` for a cache without positions.
        """
        require_positions(info, state)
        attention = self.attention
        query, key, value = attention.project(x, info, None if state is None else state.tokens)
        query, key, value = map(checkpoint_name, tap_heads(query, key, value), ("query", "key", "value"))
        constant_x = lax.stop_gradient(x)
        indexer = train_if_measured(self.indexer)
        cos_sin = None if attention.rotary is None else compute_cos_sin(attention.rotary, x, info)
        index_query = indexer.project_query(constant_x, attention.rotary, cos_sin)
        index_key = indexer.project_key(constant_x)
        if state is None:
            mixed = self.attend_to_sequence(query, key, value, index_query, index_key, info)
        else:
            assert info.positions is not None  # see require_positions
            no_value = index_key[..., :0]
            tokens = state.tokens.write(key, value, info.positions)
            index = state.index.write(index_key, no_value, info.positions, indexer.block, indexer.average)
            state = IndexedCache(tokens, index)
            mixed = self.attend_to_cache(query, index_query, state, info.positions)
        mixed = checkpoint_name(mixed, "attention")
        return attention.out(attention.finish(mixed.reshape(*mixed.shape[:2], -1), x)), state

    def attend_to_sequence(
        self,
        query: HeadVectors,
        key: KVHeads,
        value: ValueHeads,
        index_query: _IndexQuery,
        index_key: _IndexKey,
        info: TokenInfo,
    ) -> HeadVectors:
        """Attend within the sequence."""
        indexer = train_if_measured(self.indexer)
        rotary = self.attention.rotary
        is_measured = asks_for(DIVERGENCE)
        key, value = (select_kv_heads(x, query, self.attention.group) for x in (key, value))
        selects = query.shape[1] * num_shards(query, "seq") > indexer.top * indexer.block and not self.dense
        if not (selects or is_measured):
            return causal_attention(query, (key, value), info.segment_ids, **self._options())
        keys, mask = gather_keys(
            query, (key, value, index_key), info.segment_ids, implementation=self.attention.implementation
        )
        key, value, index_key = keys
        positions = jnp.broadcast_to(jnp.arange(key.shape[1]), key.shape[:2])
        if info.positions is not None:
            positions = all_gather(info.positions, "seq", axis=1)
        (tokens, first), key_places, places = split_sequence((index_key, positions), query, mask, indexer.block)
        block_keys = _rotate(indexer.average(tokens), rotary, _find_angles(rotary, first[:, :, 0]))
        scores = indexer.score(index_query, block_keys)
        if selects:
            selected = select_keys(indexer.select(scores, places)[:, None], key_places.own)[:, 0]
            mask = dataclasses.replace(mask, selected=selected)
        if is_measured:
            constants = lax.stop_gradient((query, key, self.attention.score_options()))
            probabilities = attention_probabilities(*constants[:2], mask, **constants[2])
            own = jnp.broadcast_to(key_places.own, key.shape[:2])
            members = jax.nn.one_hot(own, scores.shape[-1])
            attention = reduce(jnp.einsum("bhqk,bkn->bqn", probabilities, members), over="heads")
            divergence = indexer_divergence(attention, scores, places.see_whole(scores.shape[-1]))
            tap_value(DIVERGENCE, divergence, ("batch", "seq"))
        return select_attention()(query, key, value, mask, **self._options())

    def attend_to_cache(
        self, query: HeadVectors, index_query: _IndexQuery, state: IndexedCache, positions: Positions
    ) -> HeadVectors:
        """Attend to the tokens of a cache, the new ones among them."""
        tokens = state.tokens
        key, value, key_positions = tokens.read()
        key, value = (select_kv_heads(x, query, self.attention.group) for x in (key, value))
        selected = self._select_slots(index_query, state, positions)
        mask = AttentionMask(True, None, None, None, positions, key_positions, selected)
        return mark_overfull(cached_attention(query, key, value, mask, **self._options()), tokens)

    def _select_slots(
        self, index_query: _IndexQuery, state: IndexedCache, positions: Positions
    ) -> Bool[Array, "batch _ slots"] | None:
        """Return the slots that each new token attends to; None if these are all."""
        indexer = lax.stop_gradient(self.indexer)
        rotary = self.attention.rotary
        block_keys = state.index.key.swapaxes(1, 2)
        blocks = block_keys.shape[1]
        if blocks <= indexer.top or self.dense:
            return None
        first = jnp.arange(blocks)[None] * indexer.block
        block_keys = _rotate(block_keys, rotary, _find_angles(rotary, first))
        index_query, positions = gather_choosers(index_query, positions, state.tokens)
        scores = indexer.score(index_query, block_keys)
        chosen = indexer.select(scores, place_in_blocks(positions, indexer.block))
        return select_keys(chosen[:, None], state.tokens.positions // indexer.block)[:, 0]

    def _options(self) -> dict[str, Any]:
        return {"implementation": self.attention.implementation, **self.attention.score_options()}

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> IndexedCache:
        """Return an empty cache for `length` tokens."""
        size = self.indexer.head_dim
        blocks = -(-length // self.indexer.block)
        tokens = KeyValueCache.empty(batch, length, 1, size, dtype, length, value_dim=0)
        index = BlockCache(tokens, jnp.zeros((batch, 1, blocks, size), dtype), None)
        return IndexedCache(self.attention.init_state(batch, length, dtype), index)

    @property
    def rotary(self) -> Rotary | None:
        """RoPE of queries and keys, and of the indexer."""
        return self.attention.rotary


def _rotate(
    x: Float[Array, "batch seq heads _"], rotary: Rotary | None, cos_sin: Angles | None
) -> Float[Array, "batch seq heads _"]:
    if rotary is None or cos_sin is None:
        return x
    return apply_rotary(x, *cos_sin, interleaved=rotary.interleaved)


def _find_angles(rotary: Rotary | None, positions: Positions) -> Angles | None:
    return None if rotary is None else rotary(positions)
