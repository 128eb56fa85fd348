"""Softmax attention with values of another size than keys, and a scale on the values."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.layers import AbstractLinear, TokenInfo
from zoo.layers.attention.base import AbstractGroupedAttention, check_attention_sizes, make_projections, rotate
from zoo.layers.heads import split_heads
from zoo.layers.kv_cache import KeyValueCache
from zoo.ops.attention import ATTENTION
from zoo.ops.rotary import Rotary
from zoo.parallel import full_precision, implementation_option
from zoo.shapes import HeadVectors, HiddenStates, KVHeads, ValueHeads


class ValueScaledAttention(AbstractGroupedAttention):
    """Causal grouped-query attention with values of `value_dim` features, times a constant (Xiaomi, "MiMo-V2-Flash",
    arXiv:2601.02780):

        q, k = rotate(W x),    v = value_scale W_v x
        y = W_out softmax(q kᵀ head_dim ** -0.5 + mask) v

    RoPE, window, sinks and supported meshes are as in `zoo.layers.Attention`.
    """

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear
    sinks: Float[Array, "heads"] | None = full_precision()

    head_dim: int = eqx.field(static=True)
    value_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Query heads per KV head."""
    value_scale: float = eqx.field(static=True)
    rotary: Rotary | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    implementation: str | Callable = implementation_option(ATTENTION)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        value_scale: float | int = 1.0,
        rotary: Rotary | None = None,
        bias: bool = False,
        out_bias: bool = False,
        window: int | None = None,
        sinks: bool = False,
        implementation: str | Callable = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `value_dim`: features of a value head, `head_dim` by default. `value_scale`: of the values.
        - `implementation`: one that supports values of another size than keys.

        Other options are as in `zoo.layers.Attention`. **Raises** `ValueError` as it does, and for a `value_dim` below
        1.
        """
        kv_heads, head_dim = check_attention_sizes(embed, heads, kv_heads, head_dim, window)
        if value_dim is None:
            value_dim = head_dim
        if value_dim < 1:
            raise ValueError(f"value_dim is {value_dim}, and a size is at least 1")
        projections = make_projections(
            embed,
            heads,
            kv_heads,
            head_dim,
            value_dim=value_dim,
            bias=bias,
            out_bias=out_bias,
            out_scale=out_scale,
            key=key,
        )
        self.query, self.key, self.value, self.out = projections
        self.sinks = jnp.zeros(heads, jnp.float32) if sinks else None
        self.head_dim = head_dim
        self.value_dim = value_dim
        self.group = heads // kv_heads
        self.value_scale = float(value_scale)
        self.rotary = rotary
        self.window = window
        self.implementation = implementation

    def project(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None
    ) -> tuple[HeadVectors, KVHeads, ValueHeads]:
        query = split_heads(self.query(x), self.head_dim)
        key = split_heads(self.key(x), self.head_dim)
        value = self.value_scale * split_heads(self.value(x), self.value_dim)
        query, key = rotate(query, key, self.rotary, x, info, state)
        return query, key, value

    def score_options(self) -> dict[str, Any]:
        return {"sinks": self.sinks}
