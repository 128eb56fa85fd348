"""Multi-head latent attention to the few keys that a small indexer scores highest for each query."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Key

from zoo.ops.attention import AttentionMask
from zoo.ops.attention.indexer import indexer_divergence, score_keys, select_highest
from zoo.ops.rotary import Rotary, apply_rotary
from zoo.parallel import (
    Dim,
    Module,
    all_gather,
    full_precision,
    implementation_option,
    num_shards,
    reduce,
    shard,
)
from zoo.parallel.scope import asks_for, tap_value
from zoo.shapes import HeadVectors, HiddenStates, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer, AbstractNorm
from ..heads import split_heads
from ..kv_cache import IndexedLatentCache, LatentCache, require_positions
from ..linear import Linear
from ..norm import LayerNorm
from ..rotary import compute_cos_sin
from ..token_info import TokenInfo
from .context import find_places
from .key_blocks import check_sizes
from .latent import LatentAttention

DIVERGENCE = "indexer_divergence"
"""Name of the value of a sparse layer that trains its indexer."""

Angles = tuple[Array, Array]
"""Cos and sin of the angles of tokens, or of blocks."""
_Indexer = TypeVar("_Indexer")
_Selected = Bool[Array, "batch _ _"]


class LightningIndexer(Module):
    """Lightning indexer (DeepSeek-V3.2, arXiv:2512.02556, section 2.1): a query t selects the `top` keys s with the
    highest

        I(t, s) = sum over heads h of w_h(t) relu(q_h(t) . k(s)) (head_dim heads) ** -0.5

        q_h = rotate(W_query_up,h c),    k = rotate(norm(W_key x)),    w = W_weights x

    of the keys that it may attend to; c is the latent of queries. RoPE turns the first features of a head, or
    with `rotates_last` the last, in pairs of halves or, if `interleaved`, of neighbors.

    A selection has no gradient, and so neither have the parameters here, nor x and c through them: as in transformers.
    An indexer is trained by a loss of its own (`zoo.models.indexer_loss`). Transformers neither rotates queries and
    keys by a Hadamard matrix, which changes no product, nor rounds them to FP8, and nor does this.

    Scores are float32 and held for all heads, 4 heads n T bytes per row for n queries and T keys. Heads are sharded
    over `tensor`.
    """

    query_up: AbstractLinear
    key: AbstractLinear
    key_norm: AbstractNorm
    head_weights: AbstractLinear = full_precision()

    head_dim: int = eqx.field(static=True)
    top: int = eqx.field(static=True)
    """Keys that a query attends to at most."""
    interleaved: bool = eqx.field(static=True)
    rotates_last: bool = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        query_latent: int,
        head_dim: int,
        top: int,
        interleaved: bool = False,
        rotates_last: bool = False,
        epsilon: float = 1e-6,
        key: Key[Array, ""],
    ):
        """- `query_latent`: size of the latent of queries.
        - `top`: keys that a query selects.
        - `interleaved`: rotate pairs of neighbors. `rotates_last`: rotate the last features of a head.
        - `epsilon`: of the norm of keys.

        **Raises** `ValueError` for a size below 1.
        """
        check_sizes(heads=heads, head_dim=head_dim, top=top)
        query_key, key_key, weight_key = jax.random.split(key, 3)
        per_head = Dim("heads", head_dim)
        self.query_up = Linear(query_latent, heads * head_dim, in_=Dim("latent"), out=per_head, key=query_key)
        self.key = Linear(embed, head_dim, in_=Dim("embed"), out=Dim("head_dim"), key=key_key)
        self.key_norm = LayerNorm(head_dim, features=Dim("head_dim"), epsilon=epsilon)
        self.head_weights = Linear(embed, heads, in_=Dim("embed"), out=Dim("heads"), key=weight_key)
        self.head_dim = head_dim
        self.top = top
        self.interleaved = interleaved
        self.rotates_last = rotates_last

    def project_keys(self, x: HiddenStates, cos_sin: Angles) -> Float[Array, "batch seq features"]:
        """Return the key of each token, as cached."""
        keys = self.key_norm(self.key(x))
        return self._rotate(keys[:, :, None], cos_sin)[:, :, 0]

    def score(
        self,
        x: HiddenStates,
        latent: Float[Array, "batch seq _"],
        keys: Float[Array, "batch key_seq features"],
        cos_sin: Angles,
    ) -> Float[Array, "batch seq key_seq"]:
        """Return the scores I of queries and keys, from the latents of the queries."""
        query = self._rotate(split_heads(self.query_up(latent), self.head_dim), cos_sin)
        return score_all_heads(query, keys, self.head_weights(x.astype(jnp.float32)))

    def _rotate(self, x: HeadVectors, cos_sin: Angles) -> HeadVectors:
        before = self.head_dim - 2 * cos_sin[0].shape[-1] if self.rotates_last else 0
        rest, turned = jnp.split(x, [before], axis=-1)
        return jnp.concatenate([rest, apply_rotary(turned, *cos_sin, interleaved=self.interleaved)], axis=-1)

    def select(self, scores: Float[Array, "batch query_seq key_seq"], mask: Bool[Array, "#batch _ _"]) -> _Selected:
        """Return True at the `top` highest scores of each query: see `zoo.ops.attention.indexer.select_highest`."""
        return select_highest(scores, mask, self.top)


class SparseLatentAttention(AbstractMixer):
    """Multi-head latent attention to the keys that a `LightningIndexer` selects for each query (DeepSeek Sparse
    Attention, DSA; DeepSeek-V3.2, arXiv:2512.02556, section 2.1):

        y = W_out [softmax(q_h k_hᵀ scale + mask of the selected keys) v_h of each head]

    With `zoo.layers.LatentAttention` as `attention`, whose queries have a latent that the indexer reads. A layer
    without an indexer takes the selection of a layer before it (`SelectionBlock` of `glm_moe_dsa`).

    This is the reference: it applies the selection as a mask, and saves neither memory nor FLOPs over dense attention.
    A row or cache of at most `top` tokens is attended to densely, and the indexer computes its keys only.

    The indexer learns from its divergence from the attention of each token t, over the keys that t attends to:

        KL(p_t || softmax(I_t)),    p_t = sum over heads of the attention, divided by its sum

    in which p, x and c are constants. It is a value of the layer, computed only for `zoo.models.indexer_loss` or
    `zoo.capture`, and holds the attention and the scores of all heads, 4 (heads + index heads) n T bytes per row. With
    `dense`, the layer attends to all keys and selects none, to train a new indexer before it selects.

    The cache holds the keys of the indexer too, head_dim numbers per token. Supported meshes are as in
    `LatentAttention`; where `context` shards the sequence, only `Layout(context="gathered")` computes it.
    """

    shards_sequence = True
    shards_state = True
    value_names = (DIVERGENCE,)
    per_head_linears = ("attention.key_up", "attention.value_up")

    attention: LatentAttention
    indexer: LightningIndexer | None

    dense: bool = implementation_option()

    def __init__(
        self,
        attention: Callable[..., LatentAttention],
        indexer: Callable[..., LightningIndexer] | None,
        *,
        dense: bool = False,
        key: Key[Array, ""],
    ):
        """- `attention`, `indexer`: factories `key= -> layer`; without an indexer, the layer takes the selection of a
          layer before it.
        - `dense`: attend to all keys.
        """
        attention_key, indexer_key = jax.random.split(key)
        self.attention = attention(key=attention_key)
        self.indexer = None if indexer is None else indexer(key=indexer_key)
        self.dense = dense

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: IndexedLatentCache | None = None
    ) -> tuple[ResidualStream, IndexedLatentCache | None]:
        """With a cache as `state`, the new tokens follow the cached ones, at `info.positions`.

        **Raises** `ValueError` for a cache without positions, and for a layer without an indexer.
        """
        if self.indexer is None:
            raise ValueError(
                "this layer has no indexer, and attends to the keys that a layer before it has selected: run it in a "
                "SelectionBlock"
            )
        y, (state, _) = self.mix(x, info, state)
        return y, state

    def mix(
        self,
        x: HiddenStates,
        info: TokenInfo,
        state: IndexedLatentCache | None = None,
        selected: _Selected | None = None,
    ) -> tuple[ResidualStream, tuple[IndexedLatentCache | None, _Selected | None]]:
        """Return the output, the updated cache, and the keys that each query attends to: `selected` for a layer without
        an indexer. None are all keys.

        **Raises** `ValueError` for a cache without positions.
        """
        require_positions(info, state)
        attention = self.attention
        rope_length = None if state is None else state.rope_length
        cos_sin = compute_cos_sin(attention.rotary, x, info, rope_length)
        latent = attention.compress_queries(x)
        features = attention.project_features(x, cos_sin)
        query = attention.expand_queries(latent, cos_sin)
        index_x, latent = lax.stop_gradient((x, latent))
        indexer = self.indexer
        if state is None:
            if indexer is not None:
                selected = self._select_in_sequence(indexer, index_x, latent, cos_sin, info, query, features)
            mixed = attention.attend_to_sequence(query, features, info, selected)
        else:
            assert info.positions is not None  # see require_positions
            state = dataclasses.replace(state, latents=state.latents.write(features, info.positions))
            if indexer is not None:
                assert state.index_keys is not None  # see init_state
                indexer = lax.stop_gradient(indexer)
                keys = state.index_keys.write(indexer.project_keys(index_x, cos_sin), info.positions)
                state = dataclasses.replace(state, index_keys=keys)
                if not self.dense:
                    selected = _select_in_cache(indexer, index_x, latent, cos_sin, info, keys)
            mixed = attention.attend_to_cache(query, state.latents, info.positions, selected)
        return attention.finish(mixed, x), (state, selected)

    def _select_in_sequence(
        self,
        indexer: LightningIndexer,
        x: HiddenStates,
        latent: Array,
        cos_sin: Angles,
        info: TokenInfo,
        query: HeadVectors,
        features: Float[Array, "batch seq _"],
    ) -> _Selected | None:
        """Return the keys of the whole row that each token selects; None if these are all. Where the divergence of the
        indexer is asked for, compute it."""
        is_measured = asks_for(DIVERGENCE)
        seq = x.shape[1]
        key_seq = seq * num_shards(x, "seq")
        selects = key_seq > indexer.top and not self.dense
        if not (selects or is_measured):
            return None
        indexer = train_if_measured(indexer)
        keys = all_gather(indexer.project_keys(x, cos_sin), "seq", axis=1)
        key_segments = None if info.segment_ids is None else all_gather(info.segment_ids, "seq", axis=1)
        mask = AttentionMask(True, None, info.segment_ids, key_segments, *find_places(query, key_seq))
        scores = indexer.score(x, latent, keys, cos_sin)
        if selects:
            selected = indexer.select(lax.stop_gradient(scores), materialize_causal(mask, seq, key_seq))
            mask = dataclasses.replace(mask, selected=selected)
        if is_measured:
            probabilities = self.attention.sum_probabilities(query, features, mask)
            divergence = indexer_divergence(probabilities, scores, materialize_causal(mask, seq, key_seq))
            tap_value(DIVERGENCE, divergence, ("batch", "seq"))
        return mask.selected

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> IndexedLatentCache:
        """Return an empty cache for `length` tokens."""
        latents = self.attention.init_state(batch, length, dtype)
        if self.indexer is None:
            return IndexedLatentCache(latents, None)
        return IndexedLatentCache(latents, LatentCache.empty(batch, self.indexer.head_dim, dtype, length))

    @property
    def rotary(self) -> Rotary:
        """RoPE of the attention, and of the indexer."""
        return self.attention.rotary

    @property
    def rope_switch_length(self) -> int | None:
        return self.attention.rope_switch_length


def _select_in_cache(
    indexer: LightningIndexer, x: HiddenStates, latent: Array, cos_sin: Angles, info: TokenInfo, keys: LatentCache
) -> _Selected | None:
    """Return the slots of this device that each new token selects; None if it selects from no more than it takes.

    Where slots are sharded, each device scores its own for all new tokens, and these scores are all-gathered.
    """
    slots = keys.positions.shape[1] * num_shards(keys.positions, "slots")
    if slots <= indexer.top:
        return None
    assert info.positions is not None  # there is a cache
    gather = lambda array: all_gather(array, "seq", axis=1)
    x, latent, positions, cos, sin = (gather(array) for array in (x, latent, info.positions, *cos_sin))
    scores = all_gather(indexer.score(x, latent, keys.features, (cos, sin)), "slots", axis=2)
    places = positions, all_gather(keys.positions, "slots", axis=1)
    mask = AttentionMask(True, None, None, None, *places)
    return shard(indexer.select(scores, materialize_causal(mask, positions.shape[1], slots)), "slots", axis=2)


def score_all_heads(
    query: HeadVectors, keys: Float[Array, "batch key_seq head_dim"], weights: Float[Array, "batch seq heads"]
) -> Float[Array, "batch seq key_seq"]:
    """Return the sum of w_h relu(q_h . k) (head_dim heads) ** -0.5 over the heads h of all devices."""
    heads = weights.shape[-1] * num_shards(weights, "heads")
    return reduce(score_keys(query, keys, weights * heads**-0.5, scale=query.shape[-1] ** -0.5), over="heads")


def train_if_measured(indexer: _Indexer) -> _Indexer:
    """Return the indexer of the module that runs, as a constant unless its divergence is asked for."""
    return indexer if asks_for(DIVERGENCE) else lax.stop_gradient(indexer)


def materialize_causal(mask: AttentionMask, query_seq: int, key_seq: int) -> Bool[Array, "rows query_seq key_seq"]:
    """Return a causal mask as an array."""
    materialized = mask.materialize(query_seq, key_seq)
    assert materialized is not None  # causal
    return materialized
