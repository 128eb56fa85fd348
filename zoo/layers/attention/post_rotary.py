"""Softmax attention that normalizes or scales queries and keys after RoPE."""

from collections.abc import Callable

import equinox as eqx
from jaxtyping import Array, Key

from zoo.ops.attention import ATTENTION
from zoo.ops.rotary import Rotary
from zoo.parallel import implementation_option
from zoo.shapes import HeadVectors, HiddenStates, KVHeads

from ..abstract import AbstractLinear, AbstractNorm
from ..heads import split_heads
from ..kv_cache import KeyValueCache
from ..query_scale import QueryScale, scale_queries
from ..token_info import TokenInfo
from .base import AbstractGroupedAttention, check_attention_sizes, make_projections, rotate


class PostRotaryAttention(AbstractGroupedAttention):
    """Causal grouped-query attention whose QK norm follows RoPE (Tencent, "Hunyuan-A13B", 2025), or whose queries are
    scaled by position (Mistral AI, "Ministral 3", arXiv:2601.08584):

        q = s(position) norm(rotate(W_q x)),    k = norm(rotate(W_k x)),    v = W_v x
        y = W_out softmax(q kᵀ head_dim ** -0.5 + mask) v

    A norm with weights does not commute with RoPE: the cache holds keys that are rotated and normalized. RoPE, window
    and supported meshes are as in `zoo.layers.Attention`.
    """

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

        Other options and **raised** errors are as in `zoo.layers.Attention`.
        """
        kv_heads, head_dim = check_attention_sizes(embed, heads, kv_heads, head_dim, window)
        projections = make_projections(
            embed, heads, kv_heads, head_dim, bias=bias, out_bias=out_bias, out_scale=out_scale, key=key
        )
        self.query, self.key, self.value, self.out = projections
        self.query_norm = None if qk_norm is None else qk_norm()
        self.key_norm = None if qk_norm is None else qk_norm()
        self.head_dim = head_dim
        self.group = heads // kv_heads
        self.rotary = rotary
        self.query_scale = query_scale
        self.window = window
        self.implementation = implementation

    def project(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None
    ) -> tuple[HeadVectors, KVHeads, KVHeads]:
        query = split_heads(self.query(x), self.head_dim)
        key = split_heads(self.key(x), self.head_dim)
        value = split_heads(self.value(x), self.head_dim)
        query, key = rotate(query, key, self.rotary, x, info, state)
        if self.query_norm is not None and self.key_norm is not None:
            query = self.query_norm(query)
            key = self.key_norm(key)
        if self.query_scale is not None:
            query = scale_queries(query, self.query_scale, x, info)
        return query, key, value
