"""Softmax attention with linear biases (ALiBi) in place of position embeddings."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from zoo.ops.attention import ATTENTION
from zoo.parallel import implementation_option
from zoo.parallel.collectives import shard_offset
from zoo.shapes import HeadVectors, HiddenStates, KVHeads, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer
from ..heads import split_heads
from ..kv_cache import KeyValueCache
from ..token_info import TokenInfo, token_positions
from .base import attend, check_attention_sizes, make_cache, make_projections
from .tapped import VALUE_NAMES

_BIAS_CHANNELS = 3
"""Channels of the keys that hold a bias: its 24 bits, in pieces that bfloat16 has exactly."""


class AlibiAttention(AbstractMixer):
    """Causal multi-head attention with linear biases (ALiBi; Press et al., arXiv:2108.12409, section 3):

        q, k, v = clip(W x)
        y = W_out softmax(q kᵀ scale + slope (key_position - query_position) + mask) v

    slope_h = 2 ** (-8 h / heads) for h = 1, 2, ..., heads, a power of two; see `compute_alibi_slopes`.

    A query's own position does not change its softmax, so the bias depends only on the key and the head. It is held in
    3 more channels of the keys, in bfloat16 pieces that sum to its 24 bits, against ones in the queries: every
    implementation of attention, form of `context` and KV cache then computes it, and in bfloat16 far tokens keep their
    distances. Values have no such channels, so implementations that require values as wide as keys are unavailable. A
    key serves one head. Supported meshes are as in `zoo.layers.Attention`.
    """

    shards_sequence = True
    value_names = VALUE_NAMES
    shards_state = True

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear

    head_dim: int = eqx.field(static=True)
    slopes: tuple[float, ...] = eqx.field(static=True)
    """One per head, of all devices."""
    rounded: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    clip: float | None = eqx.field(static=True)
    implementation: str | Callable = implementation_option(ATTENTION)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        head_dim: int | None = None,
        rounded: bool = False,
        scale: float | int | None = None,
        clip: float | int | None = None,
        bias: bool = False,
        out_bias: bool = False,
        implementation: str | Callable = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `rounded`: round slopes, positions and biases to bfloat16, and multiply biases by the scale of the scores
          (Falcon-RW, Penedo et al., arXiv:2306.01116).
        - `implementation`: one that supports values of another size than keys.

        Other options are as in `zoo.layers.Attention`. **Raises** `ValueError` if heads does not divide embed, and for
        a clip that is not above 0.
        """
        heads, head_dim = check_attention_sizes(embed, heads, None, head_dim)
        if clip is not None and clip <= 0:
            raise ValueError(f"a clip bounds values to more than 0, not to {clip}")
        options = {"bias": bias, "out_bias": out_bias, "out_scale": out_scale}
        projections = make_projections(embed, heads, heads, head_dim, key=key, **options)
        self.query, self.key, self.value, self.out = projections
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else float(scale)
        self.slopes = compute_alibi_slopes(heads)
        self.rounded = rounded
        self.clip = None if clip is None else float(clip)
        self.implementation = implementation

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None = None
    ) -> tuple[ResidualStream, KeyValueCache | None]:
        """With a KV cache as `state`, the new tokens follow the cached ones, at `info.positions`.

        **Raises** `ValueError` for a cache without positions.
        """
        query, key, value = (self._split_heads(linear(x)) for linear in (self.query, self.key, self.value))
        query = jnp.pad(query, [(0, 0)] * 3 + [(0, _BIAS_CHANNELS)], constant_values=1)
        key = jnp.concatenate([key, self._compute_bias_channels(key, token_positions(x, info))], axis=-1)
        options = {"group": 1, "scale": self.scale, "implementation": self.implementation}
        mixed, state = attend(query, key, value, info, state, **options)
        return self.out(mixed.reshape(*mixed.shape[:2], -1)), state

    def _split_heads(self, x: Float[Array, "batch seq _"]) -> HeadVectors:
        x = split_heads(x, self.head_dim)
        if self.clip is None:
            return x
        return jnp.clip(x, -self.clip, self.clip)

    def _compute_bias_channels(
        self, key: KVHeads, positions: Int[Array, "*batch seq"]
    ) -> Float[Array, "batch seq kv_heads _"]:
        """Return the biases of keys, divided by the scale of the scores, in pieces that bfloat16 has exactly."""
        heads = key.shape[2]
        slopes = jnp.array(self.slopes, jnp.float32)
        slopes = lax.dynamic_slice_in_dim(slopes, shard_offset(key, "kv_heads", heads), heads)
        rest = _compute_biases(slopes, positions, self.scale, self.rounded)
        pieces = []
        for _ in range(_BIAS_CHANNELS):
            pieces.append(_round_to_bfloat16(rest))
            rest = rest - pieces[-1]
        channels = jnp.stack(pieces, axis=-1).astype(key.dtype)
        return jnp.broadcast_to(channels, (*key.shape[:3], _BIAS_CHANNELS))

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> KeyValueCache:
        """Return an empty KV cache for `length` tokens, whose keys have the channels of the biases."""
        heads = self.key.out_size // self.head_dim
        size = self.head_dim + _BIAS_CHANNELS
        return make_cache(batch, length, heads, size, dtype, value_dim=self.head_dim)


def _compute_biases(
    slopes: Float[Array, "heads"], positions: Int[Array, "*batch seq"], scale: float, rounded: bool
) -> Float[Array, "*batch seq heads"]:
    """Return the biases of keys for some heads, divided by the scale of the scores, in float32."""
    places = jnp.maximum(positions, 0).astype(jnp.float32)[..., None]
    if rounded:
        return _round_to_bfloat16(_round_to_bfloat16(slopes) * _round_to_bfloat16(places))
    return slopes * places / scale


def _round_to_bfloat16(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def compute_alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head: 2 ** (-8 h / n) for h = 1, 2, ..., n, for n heads. If the number of heads is not a
    power of two, n is the power of two below it, and the remaining heads take the slopes of 2 n heads with odd h (Press
    et al., arXiv:2108.12409, section 3, and its code)."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return tuple(slopes + [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * (heads - power), 2)])
