"""Softmax attention with gated heads, by channel or by head, before the output projection."""

from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key

from zoo.ops.attention import ATTENTION
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim, implementation_option
from zoo.shapes import HeadVectors, HiddenStates, KVHeads

from ..abstract import AbstractLinear, AbstractNorm
from ..heads import split_heads
from ..kv_cache import KeyValueCache
from ..linear import Linear
from ..token_info import TokenInfo
from .base import AbstractGroupedAttention, check_attention_sizes, make_projections, rotate


class GatedAttention(AbstractGroupedAttention):
    """Causal grouped-query attention with an output gate (Qiu et al., arXiv:2505.06708, section 2.2, position G1;
    Trinity, Arcee AI, 2025):

        y = W_out (activation(W_gate x) * softmax(q kᵀ scale + mask) v)

    Queries, keys, values and supported meshes are as in `zoo.layers.Attention`. The gate has a value for each channel
    of the queries, or one for each head, and is sharded as they are. Its activation is a sigmoid by default.
    """

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    gate: AbstractLinear
    out: AbstractLinear
    query_norm: AbstractNorm | None
    key_norm: AbstractNorm | None

    head_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Query heads per KV head."""
    rotary: Rotary | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    per_head: bool = eqx.field(static=True)
    """One gate for each head."""
    activation: Callable = eqx.field(static=True)
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
        bias: bool = False,
        out_bias: bool = False,
        window: int | None = None,
        per_head: bool = False,
        activation: Callable = jax.nn.sigmoid,
        implementation: str | Callable = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `per_head`: one gate for each head rather than each channel. `activation`: of the gates.

        Other options and **raised** errors are as in `zoo.layers.Attention`; the gate has no bias."""
        kv_heads, head_dim = check_attention_sizes(embed, heads, kv_heads, head_dim, window)
        key, gate_key = jax.random.split(key)
        projections = make_projections(
            embed, heads, kv_heads, head_dim, bias=bias, out_bias=out_bias, out_scale=out_scale, key=key
        )
        self.query, self.key, self.value, self.out = projections
        channels = 1 if per_head else head_dim
        gate_dim = Dim("heads", channels)
        self.gate = Linear(embed, heads * channels, in_=Dim("embed"), out=gate_dim, key=gate_key)
        self.query_norm = None if qk_norm is None else qk_norm()
        self.key_norm = None if qk_norm is None else qk_norm()
        self.head_dim = head_dim
        self.group = heads // kv_heads
        self.rotary = rotary
        self.window = window
        self.per_head = per_head
        self.activation = activation
        self.implementation = implementation

    def project(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None
    ) -> tuple[HeadVectors, KVHeads, KVHeads]:
        query = split_heads(self.query(x), self.head_dim, self.query_norm)
        key = split_heads(self.key(x), self.head_dim, self.key_norm)
        value = split_heads(self.value(x), self.head_dim)
        query, key = rotate(query, key, self.rotary, x, info, state)
        return query, key, value

    def finish(self, mixed: Float[Array, "batch seq features"], x: HiddenStates) -> Float[Array, "batch seq features"]:
        gate = self.activation(self.gate(x))
        if self.per_head:
            heads = split_heads(mixed, self.head_dim)
            return (gate[..., None] * heads).reshape(mixed.shape)
        return gate * mixed
