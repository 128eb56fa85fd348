"""Cross-attention: a decoder's tokens attend to an encoded source."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Key

from zoo.ops.attention import ATTENTION, AttentionMask
from zoo.parallel import Module, all_gather, implementation_option
from zoo.shapes import HiddenStates, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer
from ..heads import select_kv_heads, split_heads
from ..token_info import TokenInfo
from .base import check_attention_sizes, make_projections
from .tapped import VALUE_NAMES, select_attention, tap_heads


class EncodedSource(Module):
    """Output of an encoder: a vector for each token of a source, or for each frame."""

    x: Float[Array, "batch seq features"]
    mask: Bool[Array, "batch seq"] | None = None
    """True for real tokens; None if all are."""


class SourceKeys(Module):
    """Keys and values of a source, computed once and read at every step of decoding."""

    key: Float[Array, "batch source kv_heads head_dim"]
    value: Float[Array, "batch source kv_heads head_dim"]
    mask: Bool[Array, "batch source"] | None = None


class CrossAttention(AbstractMixer):
    """Attention from the tokens of a target to all tokens of a source (Vaswani et al., arXiv:1706.03762, section
    3.2.3):

        q = W_query x,    k, v = W source
        y = W_out softmax(scale q kᵀ + mask) v

    The state is the `SourceKeys` that `read` computes, in training as in decoding; a call returns it unchanged. Heads
    are sharded over `tensor`. Where `context` shards source and target, the keys and values of the source are
    all-gathered, and each device attends with the queries of its own tokens.
    """

    shards_sequence = True
    shards_state = True
    value_names = VALUE_NAMES

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear

    head_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Query heads per KV head."""
    scale: float | None = eqx.field(static=True)
    soft_cap: float | None = eqx.field(static=True)
    implementation: str | Callable = implementation_option(ATTENTION)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        source_embed: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        bias: bool = False,
        out_bias: bool = False,
        implementation: str | Callable = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """`source_embed`: features of the source, `embed` by default. Other options are as in `zoo.layers.Attention`.

        **Raises** `ValueError` if kv_heads does not divide heads, or heads does not divide embed.
        """
        kv_heads, head_dim = check_attention_sizes(embed, heads, kv_heads, head_dim)
        options = {"bias": bias, "out_bias": out_bias, "out_scale": out_scale, "source_embed": source_embed}
        projections = make_projections(embed, heads, kv_heads, head_dim, **options, key=key)
        self.query, self.key, self.value, self.out = projections
        self.head_dim = head_dim
        self.group = heads // kv_heads
        self.scale = scale
        self.soft_cap = soft_cap
        self.implementation = implementation

    def read(self, source: EncodedSource) -> SourceKeys:
        """Compute the keys and values of a source."""
        key, value = (split_heads(linear(source.x), self.head_dim) for linear in (self.key, self.value))
        mask = source.mask
        if mask is not None:
            mask = all_gather(mask, "seq", axis=1)
        return SourceKeys(all_gather(key, "seq", axis=1), all_gather(value, "seq", axis=1), mask)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: SourceKeys | None = None
    ) -> tuple[ResidualStream, SourceKeys]:
        """Attend to the keys and values of a source. **Raises** `ValueError` without them."""
        if state is None:
            raise ValueError("CrossAttention attends to a source, and was given none: state=attention.read(source)")
        query, key, value = tap_heads(split_heads(self.query(x), self.head_dim), state.key, state.value)
        query, key, value = map(checkpoint_name, (query, key, value), ("query", "key", "value"))
        key, value = (select_kv_heads(y, query, self.group) for y in (key, value))
        segments: dict[str, Any] = {}
        if state.mask is not None:
            ones = jnp.ones(query.shape[:2], jnp.int32)
            segments = {"query_segments": ones, "key_segments": state.mask.astype(jnp.int32)}
        options = {"scale": self.scale, "soft_cap": self.soft_cap, "implementation": self.implementation}
        mixed = select_attention()(query, key, value, AttentionMask(False, **segments), **options)
        return self.out(checkpoint_name(mixed, "attention").reshape(*mixed.shape[:2], -1)), state

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> SourceKeys:
        """**Raises** `NotImplementedError`: the state belongs to a source, from which `read` computes it."""
        raise NotImplementedError("the state of cross-attention is made of a source: attention.read(source)")
