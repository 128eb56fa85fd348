"""Softmax attention in which each token attends to those before and after it, for encoders."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key

from zoo.ops.attention import ATTENTION, AttentionMask, attention
from zoo.ops.axial_rotary import AxialRotary
from zoo.ops.rotary import Rotary, apply_rotary
from zoo.parallel import Dim, implementation_option
from zoo.shapes import HiddenStates, ResidualStream

from .abstract import AbstractLinear, AbstractMixer
from .attention import select_kv_heads
from .linear import Linear, resolve_head_dim
from .rotary import compute_cos_sin
from .token_info import TokenInfo


class BidirectionalAttention(AbstractMixer):
    """Grouped-query attention without a causal mask: y = W_out softmax(q kᵀ scale) v, with q and k turned by RoPE if
    there is one, over all tokens of a segment (Vaswani et al., arXiv:1706.03762, section 3.2; Devlin et al.,
    arXiv:1810.04805).

    Heads are sharded over `tensor`, as those of `Attention`. The sequence is not: `context` stays at 1.
    """

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear

    head_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Query heads per KV head."""
    rotary: Rotary | AxialRotary | None = eqx.field(static=True)
    implementation: str | Callable = implementation_option(ATTENTION)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary: Rotary | AxialRotary | None = None,
        bias: bool = False,
        out_bias: bool = False,
        implementation: str | Callable = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `kv_heads`: `heads` by default. `head_dim`: `embed / heads` by default.
        - `implementation`: a name in `zoo.ops.attention.ATTENTION`, or a function with the arguments of
          `reference_attention`.

        **Raises** `ValueError` if kv_heads does not divide heads, or heads does not divide embed.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ValueError(f"{heads} heads do not share out over {kv_heads} kv_heads")
        head_dim = resolve_head_dim(embed, heads, head_dim)
        query_key, key_key, value_key, out_key = jax.random.split(key, 4)
        embed_dim, query_dim, kv_dim = Dim("embed"), Dim("heads", head_dim), Dim("kv_heads", head_dim)
        self.query = Linear(embed, heads * head_dim, in_=embed_dim, out=query_dim, bias=bias, key=query_key)
        self.key = Linear(embed, kv_heads * head_dim, in_=embed_dim, out=kv_dim, bias=bias, key=key_key)
        self.value = Linear(embed, kv_heads * head_dim, in_=embed_dim, out=kv_dim, bias=bias, key=value_key)
        self.out = Linear(
            heads * head_dim, embed, in_=query_dim, out=embed_dim, bias=out_bias, scale=out_scale, key=out_key
        )
        self.head_dim, self.group = head_dim, heads // kv_heads
        self.rotary, self.implementation = rotary, implementation

    def __call__(self, x: HiddenStates, info: TokenInfo, state: None = None) -> tuple[ResidualStream, None]:
        query, key, value = map(self._split_heads, (self.query(x), self.key(x), self.value(x)))
        if self.rotary is not None:
            cos, sin = compute_cos_sin(self.rotary, x, info)
            query = apply_rotary(query, cos, sin, interleaved=self.rotary.interleaved)
            key = apply_rotary(key, cos, sin, interleaved=self.rotary.interleaved)
        query, key, value = map(checkpoint_name, (query, key, value), ("query", "key", "value"))
        key, value = (select_kv_heads(x, query, self.group) for x in (key, value))
        mask = AttentionMask(causal=False, query_segments=info.segment_ids, key_segments=info.segment_ids)
        mixed = attention(query, key, value, mask, implementation=self.implementation)
        return self.out(checkpoint_name(mixed, "attention").reshape(*mixed.shape[:2], -1)), None

    def _split_heads(self, x: Float[Array, "batch seq _"]) -> Float[Array, "batch seq _ head_dim"]:
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        """**Raises** `NotImplementedError`: a token attends to later ones, so none can be decoded before them."""
        raise NotImplementedError("attention in both directions has no KV cache: a token attends to those after it")
