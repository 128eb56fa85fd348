"""Softmax attention that normalizes or scales queries and keys after RoPE."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Key

from zoo.ops.attention import ATTENTION
from zoo.ops.rotary import Rotary
from zoo.parallel import implementation_option
from zoo.shapes import HeadVectors, HiddenStates, KVHeads, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer, AbstractNorm
from ..kv_cache import KeyValueCache
from ..query_scale import QueryScale, scale_queries
from ..rotary import rope_switch_length
from ..token_info import TokenInfo
from .attention import attend, check_attention_sizes, make_cache, make_projections, rotate, split_heads


class PostRotaryAttention(AbstractMixer):
    """Causal grouped-query attention whose QK norm follows RoPE (Tencent, "Hunyuan-A13B", 2025), or whose queries are
    scaled by position (Mistral AI, "Ministral 3", arXiv:2601.08584):

        q = s(position) norm(rotate(W_q x)),    k = norm(rotate(W_k x)),    v = W_v x
        y = W_out softmax(q kᵀ head_dim ** -0.5 + mask) v

    A norm with weights does not commute with RoPE: the cache holds keys that are rotated and normalized. RoPE, window
    and meshes are those of `zoo.layers.Attention`.
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
    query_scale: QueryScale | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
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
        query_scale: QueryScale | None = None,
        bias: bool = False,
        out_bias: bool = False,
        window: int | None = None,
        implementation: str | Callable = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `qk_norm`: factory of a norm over head_dim, called once for queries and once for keys.
        - `query_scale`: s, the scale of queries by position.

        Other options are those of `zoo.layers.Attention`, which **raises** the same errors.
        """
        kv_heads, head_dim = check_attention_sizes(embed, heads, kv_heads, head_dim, window)
        options = {"bias": bias, "out_bias": out_bias, "out_scale": out_scale}
        projections = make_projections(embed, heads, kv_heads, head_dim, key=key, **options)
        self.query, self.key, self.value, self.out = projections
        self.query_norm = None if qk_norm is None else qk_norm()
        self.key_norm = None if qk_norm is None else qk_norm()
        self.head_dim, self.group, self.rotary, self.window = head_dim, heads // kv_heads, rotary, window
        self.query_scale, self.implementation = query_scale, implementation

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None = None
    ) -> tuple[ResidualStream, KeyValueCache | None]:
        """With a KV cache as `state`, tokens follow those of the cache, at `info.positions`.

        **Raises** `ValueError` for a cache without positions.
        """
        options = {"group": self.group, "window": self.window, "implementation": self.implementation}
        mixed, state = attend(*self.project(x, info, state), info, state, **options)
        return self.out(mixed.reshape(*mixed.shape[:2], -1)), state

    def project(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None
    ) -> tuple[HeadVectors, KVHeads, KVHeads]:
        """Return q, k and v of the tokens `x`."""
        query, key, value = (split_heads(linear(x), self.head_dim) for linear in (self.query, self.key, self.value))
        query, key = rotate(query, key, self.rotary, x, info, state)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.query_scale is not None:
            query = scale_queries(query, self.query_scale, x, info)
        return query, key, value

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> KeyValueCache:
        """Return an empty KV cache for `length` tokens, of at most `window` slots."""
        kv_heads = self.key.out_size // self.head_dim
        return make_cache(batch, length, kv_heads, self.head_dim, dtype, window=self.window)

    @property
    def rope_switch_length(self) -> int | None:
        return rope_switch_length(self.rotary)
