"""Attention to a window of tokens and to compressed keys of all blocks before, or of the blocks that an indexer
selects."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.ops.attention import AttentionMask
from zoo.ops.attention.indexer import indexer_divergence, select_highest
from zoo.ops.attention.reference import attention_probabilities
from zoo.ops.attention.select import ATTENTION_WITH_LSE, attention_with_lse, merge_attention
from zoo.ops.normalization import rms_norm
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim, Module, all_gather, full_precision, implementation_option, reduce
from zoo.parallel.scope import asks_for, tap_value
from zoo.shapes import HeadVectors, HiddenStates, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer, AbstractNorm
from ..heads import split_heads
from ..kv_cache import LatentCache, require_positions
from ..linear import Linear
from ..norm import RMSNorm
from ..rotary import compute_cos_sin, find_length_dependent_scaling
from ..token_info import TokenInfo
from .block_compression import (
    BlockIndexer,
    KeysOfBlocks,
    TokenCompressor,
    TokenFeatures,
    TokensOfBlocks,
    rotate_last,
)
from .context import gather_keys
from .key_blocks import check_sizes, split_sequence
from .sparse_latent import DIVERGENCE, Angles, materialize_causal, train_if_measured


class CompressedCache(Module):
    """Cache of compressed attention: the key of each of the last tokens with the numbers that blocks are made of, and
    the keys of all whole blocks, for attention and for the indexer.

    Blocks are counted from position 0 of a row, and positions have no gaps. Where `context` shards the slots, every
    device has the keys of all blocks.
    """

    tokens: LatentCache
    blocks: Float[Array, "batch blocks head_dim"] | None
    index_blocks: Float[Array, "batch blocks key_dim"] | None


class _Keys(NamedTuple):
    """Keys that queries attend to, which are values, too, and the rules by which they see them."""

    tokens: Float[Array, "batch key_seq head_dim"]
    mask: AttentionMask
    blocks: KeysOfBlocks | None = None
    block_mask: AttentionMask | None = None
    index_blocks: KeysOfBlocks | None = None


class CompressedAttention(AbstractMixer):
    """Attention to a window of tokens and to compressed keys of blocks of tokens (DeepSeek-V4, 2026, section 2.3), with
    one key for all heads, which is their value, too:

        c = norm(W_query_down x),    q_h = rotate(norm(W_query_up,h c)),    k = rotate(norm(W_key x))
        o_h = rotate⁻¹(softmax(q_h [k of the window, keys of blocks, sink_h] head_dim ** -0.5) [..., 0])
        y = W_out [W_out_down,g [o_h of the heads of group g]]

    The norm of q_h has no weight. RoPE turns the last `rotary.dim` features of a head, and the output is turned back by
    the position of its query: the value of a key depends on its distance only.

    - Without `block`, attention is to the window of `window` tokens.
    - With `block`, also to the key of each block of as many tokens that ends at or before the query
      (`TokenCompressor`), turned by the position of its first token: heavily compressed attention (HCA).
    - With an `indexer`, to the blocks only that it selects for the query: compressed sparse attention (CSA), whose
      blocks `overlap`.

    Blocks are counted from the start of a text, and begin anew in each segment of a packed row. The outputs over the
    window and over blocks are merged by their log-sum-exps. Heavily compressed attention is computed by any
    implementation with a log-sum-exp; a selection is a mask, n T / `block` bytes per row for n queries and T tokens,
    and needs all scores of blocks in memory.

    The indexer learns from its divergence from the attention to blocks, as in `zoo.layers.SparseLatentAttention`. With
    `dense`, the layer attends to the keys of all blocks, to train a new indexer before it selects.

    The cache has the keys of blocks and the last tokens (`CompressedCache`). Heads are sharded over `tensor`, which
    divides `out_groups`; keys are replicated. Where `context` shards the sequence, only `Layout(context="gathered")`
    computes it, and in generation every device computes all new tokens.
    """

    shards_sequence = True
    value_names = ("queries", "keys", DIVERGENCE)
    per_head_linears = ("out_down",)

    query_down: AbstractLinear
    query_norm: AbstractNorm
    query_up: AbstractLinear
    key: AbstractLinear
    key_norm: AbstractNorm
    compressor: TokenCompressor | None
    indexer: BlockIndexer | None
    sinks: Float[Array, "heads"] = full_precision()
    out_down: AbstractLinear
    out: AbstractLinear

    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)
    """RoPE of the last `rotary.dim` features."""
    window: int = eqx.field(static=True)
    heads_per_group: int = eqx.field(static=True)
    """Heads that share a latent of the output projection."""
    epsilon: float = eqx.field(static=True)
    implementation: str | Callable = implementation_option(ATTENTION_WITH_LSE)
    dense: bool = implementation_option()

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        head_dim: int,
        query_latent: int,
        rotary: Rotary,
        window: int,
        out_groups: int,
        out_latent: int,
        block: int | None = None,
        overlap: bool = False,
        indexer: Callable[..., BlockIndexer] | None = None,
        epsilon: float = 1e-6,
        implementation: str | Callable = "auto",
        dense: bool = False,
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `query_latent`: size of the latent of queries.
        - `window`: tokens of the window, the query's own among them.
        - `out_groups`, `out_latent`: groups of heads in the output projection, and the size of a group's latent.
        - `block`: tokens of a block; None attends to the window only. `overlap`: see `TokenCompressor`.
        - `indexer`: factory `key= -> BlockIndexer` of blocks of the same size.
        - `epsilon`: of all norms.
        - `implementation`: a name in `zoo.ops.attention.select.ATTENTION_WITH_LSE`.
        - `dense`: attend to the keys of all blocks, whatever the indexer selects.

        **Raises** `ValueError` for a size below 1, for heads that `out_groups` does not divide, for RoPE of more
        features than a head has or with a scaling that depends on the length, and for an indexer of other blocks.
        """
        sizes = {"heads": heads, "head_dim": head_dim, "query_latent": query_latent, "window": window}
        check_sizes(**sizes, out_groups=out_groups, out_latent=out_latent)
        if heads % out_groups:
            raise ValueError(f"{heads} heads do not divide evenly over {out_groups} groups of the output projection")
        if rotary.dim > head_dim:
            raise ValueError(f"RoPE turns {rotary.dim} features, and a head has {head_dim}")
        if find_length_dependent_scaling(rotary) is not None:
            raise ValueError(
                "RoPE that depends on the length of the text would turn compressed keys again: use another"
            )
        keys = jax.random.split(key, 7)
        embed_dim, latent, features = Dim("embed"), Dim("latent"), Dim("head_dim")
        per_head, per_group = Dim("heads", head_dim), Dim("heads", out_latent)
        self.query_down = Linear(embed, query_latent, in_=embed_dim, out=latent, key=keys[0])
        self.query_norm = RMSNorm(query_latent, features=latent, epsilon=epsilon)
        self.query_up = Linear(query_latent, heads * head_dim, in_=latent, out=per_head, key=keys[1])
        self.key = Linear(embed, head_dim, in_=embed_dim, out=features, key=keys[2])
        self.key_norm = RMSNorm(head_dim, features=features, epsilon=epsilon)
        self.compressor = None
        if block is not None:
            self.compressor = TokenCompressor(embed, head_dim, block, overlap=overlap, epsilon=epsilon, key=keys[3])
        self.indexer = None if indexer is None else indexer(key=keys[4])
        self.sinks = jnp.zeros(heads, jnp.float32)
        width = heads // out_groups * head_dim
        self.out_down = Linear(width, out_groups * out_latent, in_=Dim("features"), out=per_group, key=keys[5])
        self.out = Linear(out_groups * out_latent, embed, in_=per_group, out=embed_dim, scale=out_scale, key=keys[6])
        self.head_dim = head_dim
        self.rotary = rotary
        self.window = window
        self.heads_per_group = heads // out_groups
        self.epsilon = epsilon
        self.implementation = implementation
        self.dense = dense
        if self.indexer is not None:
            blocks = self.indexer.compressor.block, self.indexer.compressor.overlap
            if blocks != (block, overlap):
                raise ValueError(f"(block, overlap) are {(block, overlap)} of keys, and {blocks} of the indexer")
            if rotary.dim > self.indexer.head_dim:
                raise ValueError(f"RoPE turns {rotary.dim} features, and the indexer has {self.indexer.head_dim}")

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: CompressedCache | None = None
    ) -> tuple[ResidualStream, CompressedCache | None]:
        """With a cache as `state`, the new tokens follow the cached ones, at `info.positions`.

        **Raises** `ValueError` for a cache without positions.
        """
        require_positions(info, state)
        cos_sin = compute_cos_sin(self.rotary, x, info)
        latent = self.query_norm(self.query_down(x))
        query = rms_norm(split_heads(self.query_up(latent), self.head_dim), epsilon=self.epsilon)
        query = tap_value("queries", rotate_last(query, self.rotary, cos_sin), ("batch", "seq", "heads", "head_dim"))
        key = rotate_last(split_heads(self.key_norm(self.key(x)), self.head_dim), self.rotary, cos_sin)
        key = tap_value("keys", key, ("batch", "seq", "kv_heads", "head_dim"))
        query, key = checkpoint_name(query, "query"), checkpoint_name(key, "key")
        index_x, index_latent = lax.stop_gradient((x, latent))
        features = self._join_features(x, index_x, key[:, :, 0])
        if state is None:
            keys = self._read_sequence(query, features, info)
        else:
            keys, state = self._read_cache(features, info, state)
        if self.indexer is not None:
            keys = self._select(keys, query, index_x, index_latent, cos_sin)
        mixed = self._attend(query, keys)
        if state is not None and (self.compressor is not None or not state.tokens.drops_oldest):
            is_overfull = state.tokens.written > state.tokens.length
            mixed = jnp.where(is_overfull[:, None, None, None], jnp.nan, mixed)
        mixed = checkpoint_name(mixed, "attention")
        cos, sin = cos_sin
        mixed = rotate_last(mixed, self.rotary, (cos, -sin))
        groups = mixed.reshape(*mixed.shape[:2], -1, self.heads_per_group * self.head_dim)
        return self.out(self.out_down.per_head(groups).reshape(*mixed.shape[:2], -1)), state

    def _join_features(self, x: HiddenStates, index_x: HiddenStates, key: TokenFeatures) -> TokenFeatures:
        """Return the key of each token, and the numbers that blocks are made of: all that the cache keeps of it."""
        features = [key]
        if self.compressor is not None:
            features.append(self.compressor.project(x))
        if self.indexer is not None:
            features.append(train_if_measured(self.indexer).compressor.project(index_x))
        return jnp.concatenate(features, axis=-1)

    def _read_sequence(self, query: HeadVectors, features: TokenFeatures, info: TokenInfo) -> _Keys:
        """Return the keys of the whole row. **Raises** `ValueError` where the sequence is sharded, unless the layout
        says "gathered"."""
        (every,), mask = gather_keys(query, (features[:, :, None],), info.segment_ids, implementation="auto")
        mask = dataclasses.replace(mask, window=self.window)
        tokens, others = jnp.split(every[:, :, 0], [self.head_dim], axis=-1)
        if self.compressor is None:
            return _Keys(tokens, mask)
        shape = tokens.shape[:2]
        positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)
        if info.positions is not None:
            positions = all_gather(info.positions, "seq", axis=1)
        ids = jnp.zeros(shape, jnp.int32) if mask.key_segments is None else mask.key_segments
        split, _, places = split_sequence((others, positions, ids), query, mask, self.compressor.block)
        first, ids = (x[:, :, 0] for x in split[1:])
        follows = jnp.pad(ids[:, 1:] == ids[:, :-1], ((0, 0), (1, 0)))
        blocks, index_blocks = self._make_blocks(split[0], follows, first)
        last = jnp.broadcast_to(places.own + places.is_last - 1, query.shape[:2])
        rules: dict[str, Any] = {"query_positions": last}
        rules["key_positions"] = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        if info.segment_ids is not None:
            rules |= {"query_segments": info.segment_ids, "key_segments": ids}
        return _Keys(tokens, mask, blocks, AttentionMask(True, **rules), index_blocks)

    def _read_cache(
        self, features: TokenFeatures, info: TokenInfo, state: CompressedCache
    ) -> tuple[_Keys, CompressedCache]:
        """Write new tokens, and the blocks that end in them; return the keys in the cache, and the updated cache."""
        positions = info.positions
        assert positions is not None  # see require_positions
        cache = state.tokens.write(features, positions)
        every, places = _gather_slots(cache)
        if features.shape[1] > 1:  # the ring may have dropped tokens that the first new queries attend to
            every, places = _gather_slots(state.tokens)
            every = jnp.concatenate([every.astype(features.dtype), features], axis=1)
            places = jnp.concatenate([places, positions], axis=1)
        tokens, others = jnp.split(every, [self.head_dim], axis=-1)
        keys = _Keys(tokens, AttentionMask(True, self.window, None, None, positions, places))
        if self.compressor is None or state.blocks is None:
            return keys, dataclasses.replace(state, tokens=cache)
        size = self.compressor.block
        # Blocks that end in the new tokens, after the one before them: it is read, and not written.
        numbers = state.tokens.written[:, None] // size + jnp.arange(-1, (features.shape[1] + size - 1) // size)
        made = self._make_blocks(
            _take_positions(others, places, cache.written, numbers[..., None] * size + jnp.arange(size)),
            numbers > 0,
            numbers * size,
        )
        count = state.blocks.shape[1]
        slots = jnp.where((numbers + 1) * size <= cache.written[:, None], numbers, count)[:, 1:]
        rows = jnp.arange(slots.shape[0])[:, None]
        blocks, index_blocks = (
            None if old is None or new is None else old.at[rows, slots].set(new[:, 1:].astype(old.dtype), mode="drop")
            for old, new in zip((state.blocks, state.index_blocks), made, strict=True)
        )
        rules: dict[str, Any] = {"query_positions": (positions + 1) // size - 1}
        rules["key_positions"] = jnp.broadcast_to(jnp.arange(count), (slots.shape[0], count))
        keys = keys._replace(blocks=blocks, block_mask=AttentionMask(True, **rules), index_blocks=index_blocks)
        return keys, CompressedCache(cache, blocks, index_blocks)

    def _make_blocks(
        self, tokens: TokensOfBlocks, follows: Bool[Array, "batch blocks"], first: Int[Array, "batch blocks"]
    ) -> tuple[KeysOfBlocks, KeysOfBlocks | None]:
        """Return the keys of blocks, for attention and for the indexer, turned by the positions of the first tokens."""
        assert self.compressor is not None
        cos_sin = self.rotary(first)
        own, others = jnp.split(tokens, [self.compressor.token_size], axis=-1)
        blocks = rotate_last(self.compressor.compress(own, follows)[:, :, None], self.rotary, cos_sin)[:, :, 0]
        if self.indexer is None:
            return blocks, None
        index_blocks = train_if_measured(self.indexer).compressor.compress(others, follows)
        return blocks, rotate_last(index_blocks[:, :, None], self.rotary, cos_sin)[:, :, 0]

    def _select(
        self, keys: _Keys, query: HeadVectors, x: HiddenStates, latent: TokenFeatures, cos_sin: Angles
    ) -> _Keys:
        """Return the keys with the blocks only that the indexer selects, if there are more. Where the divergence of the
        indexer is asked for, compute it."""
        assert self.indexer is not None and keys.block_mask is not None and keys.index_blocks is not None
        count = keys.index_blocks.shape[1]
        is_measured = asks_for(DIVERGENCE)
        selects = count > self.indexer.top and not self.dense
        if not (selects or is_measured):
            return keys
        scores = train_if_measured(self.indexer).score(x, latent, keys.index_blocks, self.rotary, cos_sin)
        mask = keys.block_mask
        shape = scores.shape[1:]
        if selects:
            allowed = materialize_causal(mask, *shape)
            selected = select_highest(lax.stop_gradient(scores), allowed, self.indexer.top)
            mask = dataclasses.replace(mask, selected=selected)
            keys = keys._replace(block_mask=mask)
        if is_measured:
            attention = self._sum_probabilities(query, keys)
            divergence = indexer_divergence(attention, scores, materialize_causal(mask, *shape))
            tap_value(DIVERGENCE, divergence, ("batch", "seq"))
        return keys

    def _sum_probabilities(self, query: HeadVectors, keys: _Keys) -> Float[Array, "batch seq blocks"]:
        """Return the probabilities of the attention to blocks, summed over all heads, as a constant."""
        assert keys.blocks is not None and keys.block_mask is not None
        window = materialize_causal(keys.mask, query.shape[1], keys.tokens.shape[1])
        masks = window, materialize_causal(keys.block_mask, query.shape[1], keys.blocks.shape[1])
        shown = jnp.concatenate([jnp.broadcast_to(x, (len(query), *x.shape[1:])) for x in masks], axis=-1)
        key = jnp.concatenate([keys.tokens, keys.blocks.astype(keys.tokens.dtype)], axis=1)[:, :, None]
        query, key, sinks = lax.stop_gradient((query, key, self.sinks))
        probabilities = attention_probabilities(query, key, AttentionMask(False, selected=shown), sinks=sinks)
        return reduce(probabilities[..., keys.tokens.shape[1] :].sum(1), over="heads")

    def _attend(self, query: HeadVectors, keys: _Keys) -> HeadVectors:
        """Attend to the window, to the blocks and to the sinks."""
        parts = []
        for key, mask in ((keys.tokens, keys.mask), (keys.blocks, keys.block_mask)):
            if key is None or mask is None:
                continue
            key = key.astype(query.dtype)[:, :, None]
            parts.append(attention_with_lse(query, key, key, mask, implementation=self.implementation))
        return merge_attention(parts, self.sinks)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> CompressedCache:
        """Return an empty cache for `length` tokens."""
        compressor = self.compressor
        if compressor is None:
            tokens = LatentCache.empty(batch, self.head_dim, dtype, length, window=self.window)
            return CompressedCache(tokens, None, None)
        features = self.head_dim + compressor.token_size
        blocks = -(-length // compressor.block)
        index_blocks = None
        if self.indexer is not None:
            features += self.indexer.compressor.token_size
            index_blocks = jnp.zeros((batch, blocks, self.indexer.head_dim), dtype)
        window = max(self.window, compressor.block * (1 + compressor.overlap))
        tokens = LatentCache.empty(batch, features, dtype, length, window=window)
        return CompressedCache(tokens, jnp.zeros((batch, blocks, self.head_dim), dtype), index_blocks)


def _gather_slots(cache: LatentCache) -> tuple[TokenFeatures, Int[Array, "batch slots"]]:
    """Return the features and positions of all slots."""
    return all_gather(cache.features, "slots", axis=1), all_gather(cache.positions, "slots", axis=1)


def _take_positions(
    x: TokenFeatures,
    places: Int[Array, "batch seq"],
    written: Int[Array, "batch"],
    positions: Int[Array, "batch blocks size"],
) -> TokensOfBlocks:
    """Return the features of the tokens at these positions. `places` are the positions of the tokens in `x`, in any
    order; the last of them is `written` - 1, and there are no gaps before it. Of others the result is meaningless."""
    seq = x.shape[1]
    order = jnp.argsort(places, axis=1)
    index = jnp.clip(positions + seq - written[:, None, None], 0, seq - 1).reshape(len(x), -1)
    taken = jnp.take_along_axis(x, jnp.take_along_axis(order, index, axis=1)[..., None], axis=1)
    return taken.reshape(*positions.shape, -1)
