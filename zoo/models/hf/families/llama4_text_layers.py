"""Layers of Llama 4: softmax attention within chunks of positions, and a mixture that weighs the inputs of experts."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractFeedForward, AbstractLinear, AbstractMixer, PostRotaryAttention, TokenInfo
from zoo.layers.attention.base import attend, make_cache, update_cache
from zoo.layers.attention.cached import cached_attention
from zoo.layers.attention.tapped import VALUE_NAMES, tap_heads
from zoo.layers.heads import select_kv_heads
from zoo.layers.kv_cache import KeyValueCache, mark_overfull, require_positions
from zoo.layers.moe.exchange import mix_experts
from zoo.layers.moe.mixture import AbstractMixture
from zoo.layers.moe.router import AbstractRouter, RoutingWeights, check_routing_sizes, make_score_projection
from zoo.layers.moe.routing import Routing
from zoo.layers.rotary import find_max_row_length
from zoo.layers.token_info import token_positions
from zoo.ops.attention import AttentionMask
from zoo.ops.moe.grouped_matmul import GROUPED_MATMUL
from zoo.ops.rotary import Rotary
from zoo.parallel import full_precision, implementation_option, num_shards, reduce, stacked
from zoo.shapes import HeadVectors, HiddenStates, KVHeads, ResidualStream, SegmentIds


class ChunkedAttention(AbstractMixer):
    """Causal attention within chunks of positions (Meta, "Llama 4", 2025): a token attends to itself and those before
    it whose position // `chunk` is its own. The rest is `zoo.layers.PostRotaryAttention`, and so are layers of the same
    model that have no `chunk`.

    A chunk is a segment of its own: the number of the chunk is folded into the segment ids of this layer, so that every
    implementation of attention and form of `context` computes it, packed sequences included. A KV cache holds one
    chunk. Supported meshes are as in `zoo.layers.Attention`.
    """

    shards_sequence = True
    value_names = VALUE_NAMES
    shards_state = True

    attention: PostRotaryAttention

    chunk: int | None = eqx.field(static=True)

    def __init__(self, embed: int, heads: int, *, chunk: int | None = None, key: Key[Array, ""], **options: Any):
        """`chunk`: tokens of a chunk; None attends to all tokens. Other options are as in
        `zoo.layers.PostRotaryAttention`, without a window.

        **Raises** `ValueError` as it does, and for an empty chunk.
        """
        if chunk is not None and chunk < 1:
            raise ValueError(f"a chunk holds at least 1 token, not {chunk}")
        self.attention = PostRotaryAttention(embed, heads, **options, key=key)
        self.chunk = chunk

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None = None
    ) -> tuple[ResidualStream, KeyValueCache | None]:
        """With a KV cache as `state`, the new tokens follow the cached ones, at `info.positions`.

        **Raises** `ValueError` for a cache without positions.
        """
        query, key, value = self.attention.project(x, info, state)
        if state is not None and self.chunk is not None:
            mixed, state = self._attend_to_cached_chunk(query, key, value, info, state)
        else:
            if self.chunk is not None:
                info = TokenInfo(info.positions, fold_chunks(x, info, self.chunk))
            options = {"group": self.attention.group, "implementation": self.attention.implementation}
            mixed, state = attend(query, key, value, info, state, **options)
        return self.attention.out(mixed.reshape(*mixed.shape[:2], -1)), state

    def _attend_to_cached_chunk(
        self, query: HeadVectors, key: KVHeads, value: KVHeads, info: TokenInfo, state: KeyValueCache
    ) -> tuple[HeadVectors, KeyValueCache]:
        """Attend to those tokens of a cache that are in the chunk of the query; return the updated cache as well."""
        require_positions(info, state)
        assert info.positions is not None and self.chunk is not None
        query, key, value = tap_heads(query, key, value)
        key, value, key_positions, state = update_cache(state, key, value, info.positions, self.chunk)
        key, value = (select_kv_heads(x, query, self.attention.group) for x in (key, value))
        chunks = info.positions // self.chunk, key_positions // self.chunk
        mask = AttentionMask(True, None, *chunks, info.positions, key_positions)
        mixed = cached_attention(query, key, value, mask, implementation=self.attention.implementation)
        return mark_overfull(mixed, state), state

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> KeyValueCache:
        """Return an empty KV cache for `length` tokens, of at most `chunk` slots."""
        attention = self.attention
        kv_heads = attention.key.out_size // attention.head_dim
        return make_cache(batch, length, kv_heads, attention.head_dim, dtype, window=self.chunk)

    @property
    def rotary(self) -> Rotary | None:
        """RoPE of queries and keys."""
        return self.attention.rotary

    @property
    def rope_switch_length(self) -> int | None:
        return self.attention.rope_switch_length


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


class InputWeightedMixture(AbstractFeedForward, AbstractMixture):
    """y = S(x) + Σ_e E_e(w_e x) over the top-k experts e that the router chose for x (Meta, "Llama 4", 2025). Without a
    `shared` expert, S(x) is omitted.

    Each choice of a token is a row of its own, which goes to one expert and comes back with weight 1. Experts are
    dropless and sharded as in `zoo.layers.MixtureOfExperts`.
    """

    router: AbstractRouter
    experts: AbstractFeedForward = stacked("experts")
    shared: AbstractFeedForward | None

    implementation: str = implementation_option(GROUPED_MATMUL)

    def __init__(
        self,
        router: Callable[..., AbstractRouter],
        expert: Callable[..., AbstractFeedForward],
        experts: int,
        *,
        shared: Callable[..., AbstractFeedForward] | None = None,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """`router`, `expert` and `shared` are factories, called with `key=`, `expert` once per expert."""
        router_key, experts_key, shared_key = jax.random.split(key, 3)
        self.router = router(key=router_key)
        self.experts = eqx.filter_vmap(lambda key: expert(key=key))(jax.random.split(experts_key, experts))
        self.shared = None if shared is None else shared(key=shared_key)
        self.implementation = implementation

    def __call__(self, x: HiddenStates) -> tuple[ResidualStream, tuple[Routing, ...]]:
        weights, routing = self.router(x)
        rows = (x[..., None, :] * weights[..., None].astype(x.dtype)).reshape(-1, x.shape[-1])
        choices = routing.chosen.reshape(-1, 1)
        ones = jnp.ones_like(weights.reshape(-1, 1))
        y = mix_experts(self.experts, rows, ones, choices, routing.logits.shape[-1], self.implementation)
        y = reduce(y.reshape(*weights.shape, -1).sum(-2), over="mlp", into="tokens")
        return y if self.shared is None else y + self.shared(x)[0], (routing,)


class TopSigmoidRouter(AbstractRouter):
    """Top-k of W x, weighted by the sigmoid of each, not divided by their sum (Meta, "Llama 4", 2025)."""

    scores: AbstractLinear = full_precision()

    top: int = eqx.field(static=True)

    def __init__(self, embed: int, experts: int, top: int, *, key: Key[Array, ""]):
        """**Raises** `ValueError` if `top` exceeds the number of experts."""
        check_routing_sizes(experts, top, 1, 1)
        self.scores = make_score_projection(embed, experts, False, key)
        self.top = top

    def choose(self, logits: Float[Array, "batch seq choices"]) -> tuple[RoutingWeights, Int[Array, "batch seq top"]]:
        values, chosen = jax.lax.top_k(logits, self.top)
        return jax.nn.sigmoid(values), chosen
