"""Softmax attention with grouped-query heads, RoPE and a KV cache."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from zoo.ops.attention import ATTENTION, AttentionMask
from zoo.ops.rotary import Rotary, apply_rotary
from zoo.parallel import (
    Dim,
    all_gather,
    full_precision,
    implementation_option,
    num_shards,
    shard_offset,
    sharded_axes,
)
from zoo.shapes import HeadVectors, HiddenStates, KVHeads, Positions, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer, AbstractNorm
from ..kv_cache import KeyValueCache, mark_overfull, require_positions
from ..linear import Linear, resolve_head_dim
from ..rotary import compute_cos_sin, rope_switch_length
from ..token_info import TokenInfo
from .cached import cached_attention
from .context import causal_attention

_ValueHeads = Float[Array, "batch seq kv_heads value_dim"]
_CachedKVHeads = Float[Array, "batch key_seq kv_heads head_dim"]
_CachedValueHeads = Float[Array, "batch key_seq kv_heads value_dim"]


class Attention(AbstractMixer):
    """Causal grouped-query attention (Ainslie et al., arXiv:2305.13245): `heads` query heads share `kv_heads` key and
    value heads.

        q, k = rotate(clip(norm(W x))),    v = clip(W_v x)
        y = W_out softmax(q kᵀ scale + mask) v

    Optional: QK norm, over head_dim or over all heads together; a clip to ±`clip`; RoPE; a sliding `window` of w
    tokens, in which a token attends to itself and the w - 1 before it; `soft_cap` c, which bounds scores to c
    tanh(score / c) (Gemma 2, arXiv:2408.00118, section 2); attention `sinks`, one learned logit per head that joins the
    softmax and adds no value (GPT-OSS, arXiv:2508.10925, section 2.2). Sinks keep their dtype under `cast` and are used
    in float32; transformers rounds them, and all scores, to the compute dtype.

    Heads are sharded over `tensor`; one head is never divided. With fewer kv_heads than devices on that axis, keys and
    values are replicated and each device selects the KV heads of its queries. A sequence sharded over `context` is
    attended to as `Layout.context` says (`zoo.layers.attention.context`), and a KV cache sharded over it by a merge of
    the outputs over its shards (`zoo.layers.attention.cached`).
    """

    shards_sequence = True
    shards_state = True

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear
    query_norm: AbstractNorm | None
    key_norm: AbstractNorm | None
    sinks: Float[Array, "heads"] | None = full_precision()

    head_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Query heads per KV head."""
    rotary: Rotary | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    soft_cap: float | None = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)
    clip: float | None = eqx.field(static=True)
    norm_over_heads: bool = eqx.field(static=True)
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
        norm_over_heads: Callable[..., AbstractNorm] | None = None,
        bias: bool = False,
        out_bias: bool = False,
        window: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
        clip: float | int | None = None,
        sinks: bool = False,
        implementation: str | Callable = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `kv_heads`: `heads` by default. `head_dim`: `embed / heads` by default.
        - `qk_norm`: factory of a norm over head_dim, called once for queries and once for keys.
        - `norm_over_heads`: instead, factory of a norm over all heads together (OLMoE, arXiv:2409.02060), called with
          their number of features and `features=`.
        - `scale`: of the scores, head_dim ** -0.5 by default.
        - `sinks`: add attention sinks, initialized to 0.
        - `implementation`: a name in `zoo.ops.attention.ATTENTION`, or a function with the arguments of
          `reference_attention`.

        **Raises** `ValueError` if kv_heads does not divide heads or heads does not divide embed, for an empty window, a
        clip that is not above 0, or both norms.
        """
        kv_heads, head_dim = check_attention_sizes(embed, heads, kv_heads, head_dim, window)
        if clip is not None and clip <= 0:
            raise ValueError(f"a clip bounds values to more than 0, not to {clip}")
        if qk_norm is not None and norm_over_heads is not None:
            raise ValueError("queries and keys have one norm: qk_norm, over head_dim, or norm_over_heads")
        query_dim, kv_dim = Dim("heads", head_dim), Dim("kv_heads", head_dim)
        options = {"bias": bias, "out_bias": out_bias, "out_scale": out_scale}
        self.query, self.key, self.value, self.out = make_projections(
            embed, heads, kv_heads, head_dim, key=key, **options
        )
        self.query_norm = None if qk_norm is None else qk_norm()
        self.key_norm = None if qk_norm is None else qk_norm()
        if norm_over_heads is not None:
            self.query_norm = norm_over_heads(heads * head_dim, features=query_dim)
            self.key_norm = norm_over_heads(kv_heads * head_dim, features=kv_dim)
        self.clip, self.norm_over_heads = None if clip is None else float(clip), norm_over_heads is not None
        self.sinks = jnp.zeros(heads, jnp.float32) if sinks else None
        self.head_dim, self.group, self.rotary, self.window = head_dim, heads // kv_heads, rotary, window
        self.soft_cap, self.scale, self.implementation = soft_cap, scale, implementation

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None = None
    ) -> tuple[ResidualStream, KeyValueCache | None]:
        """With a KV cache as `state`, tokens follow those of the cache, at `info.positions`.

        **Raises** `ValueError` for a cache without positions.
        """
        query = self._split_heads(self.query(x), self.query_norm)
        key = self._split_heads(self.key(x), self.key_norm)
        value = self._split_heads(self.value(x), None)
        query, key = rotate(query, key, self.rotary, x, info, state)
        options = {"scale": self.scale, "soft_cap": self.soft_cap, "sinks": self.sinks}
        options |= {"implementation": self.implementation, "window": self.window, "group": self.group}
        mixed, state = attend(query, key, value, info, state, **options)
        return self.out(mixed.reshape(*mixed.shape[:2], -1)), state

    def _split_heads(
        self, x: Float[Array, "batch seq _"], norm: AbstractNorm | None
    ) -> Float[Array, "batch seq _ head_dim"]:
        """Reshape features to heads, with QK norm and clip."""
        x = norm(x) if norm is not None and self.norm_over_heads else x
        x = split_heads(x, self.head_dim, None if self.norm_over_heads else norm)
        return x if self.clip is None else jnp.clip(x, -self.clip, self.clip)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> KeyValueCache:
        """Return an empty KV cache for `length` tokens, of at most `window` slots.

        Length-dependent RoPE scalings rotate all keys as in a sequence of `length` tokens, so that cached keys stay
        valid while the sequence grows.
        """
        kv_heads = self.key.out_size // self.head_dim
        return make_cache(batch, length, kv_heads, self.head_dim, dtype, window=self.window)

    @property
    def rope_switch_length(self) -> int | None:
        return rope_switch_length(self.rotary)


def check_attention_sizes(
    embed: int, heads: int, kv_heads: int | None, head_dim: int | None, window: int | None = None
) -> tuple[int, int]:
    """Return the number of KV heads, `heads` by default, and the head dim, `embed / heads` by default.

    **Raises** `ValueError` if kv_heads does not divide heads or heads does not divide embed, and for an empty window.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    if heads % kv_heads:
        raise ValueError(f"{heads} heads do not share out over {kv_heads} kv_heads")
    if window is not None and window < 1:
        raise ValueError(f"a window holds at least 1 token, its own, not {window}")
    return kv_heads, resolve_head_dim(embed, heads, head_dim)


def make_projections(
    embed: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    bias: bool = False,
    out_bias: bool = False,
    out_scale: float = 1.0,
    key: Key[Array, ""],
) -> tuple[Linear, Linear, Linear, Linear]:
    """Initialize the projections of attention: query, key, value and out. `value_dim` is `head_dim` by default."""
    query_key, key_key, value_key, out_key = jax.random.split(key, 4)
    value_dim, embed_dim = head_dim if value_dim is None else value_dim, Dim("embed")
    project = partial(Linear, embed, in_=embed_dim, bias=bias)
    return (
        project(heads * head_dim, out=Dim("heads", head_dim), key=query_key),
        project(kv_heads * head_dim, out=Dim("kv_heads", head_dim), key=key_key),
        project(kv_heads * value_dim, out=Dim("kv_heads", value_dim), key=value_key),
        Linear(
            heads * value_dim,
            embed,
            in_=Dim("heads", value_dim),
            out=embed_dim,
            bias=out_bias,
            scale=out_scale,
            key=out_key,
        ),
    )


def split_heads(
    x: Float[Array, "batch seq _"], head_dim: int, norm: AbstractNorm | None = None
) -> Float[Array, "batch seq _ head_dim"]:
    """Reshape features to heads, and normalize each head if there is a norm."""
    x = x.reshape(*x.shape[:2], -1, head_dim)
    return x if norm is None else norm(x)


def rotate(
    query: HeadVectors,
    key: KVHeads,
    rotary: Rotary | None,
    x: HiddenStates,
    info: TokenInfo,
    state: KeyValueCache | None,
) -> tuple[HeadVectors, KVHeads]:
    """Apply RoPE, if there is any, to queries and keys at the positions of the tokens `x`."""
    if rotary is None:
        return query, key
    cos, sin = compute_cos_sin(rotary, x, info, None if state is None else state.rope_length)
    query = apply_rotary(query, cos, sin, interleaved=rotary.interleaved)
    return query, apply_rotary(key, cos, sin, interleaved=rotary.interleaved)


def attend(
    query: HeadVectors,
    key: KVHeads,
    value: _ValueHeads,
    info: TokenInfo,
    state: KeyValueCache | None,
    *,
    group: int,
    window: int | None = None,
    **options: Any,
) -> tuple[HeadVectors, KeyValueCache | None]:
    """Attend causally within a sequence, or to the tokens of a KV cache, too; return the updated cache as well.

    - `group`: query heads per KV head.
    - `options`: of `zoo.layers.attention.context.causal_attention`.

    **Raises** `ValueError` for a cache without positions.
    """
    require_positions(info, state)
    query, key, value = map(checkpoint_name, (query, key, value), ("query", "key", "value"))
    if state is None:
        key, value = (select_kv_heads(x, query, group) for x in (key, value))
        mixed = causal_attention(query, (key, value), info.segment_ids, window=window, **options)
    else:
        key, value, key_positions, state = update_cache(state, key, value, info.positions, window)
        key, value = (select_kv_heads(x, query, group) for x in (key, value))
        positions = {"query_positions": info.positions, "key_positions": key_positions}
        mask = AttentionMask(causal=True, window=window, **positions)
        mixed = mark_overfull(cached_attention(query, key, value, mask, **options), state)
    return checkpoint_name(mixed, "attention"), state


def make_cache(
    batch: int,
    length: int,
    kv_heads: int,
    head_dim: int,
    dtype: Any,
    *,
    window: int | None = None,
    value_dim: int | None = None,
) -> KeyValueCache:
    """Return an empty KV cache for `length` tokens, of at most `window` slots."""
    drops_oldest = window is not None and window <= length
    slots = window if drops_oldest and window is not None else length
    return KeyValueCache.empty(batch, slots, kv_heads, head_dim, dtype, length, value_dim, drops_oldest)


def update_cache(
    cache: KeyValueCache,
    key: KVHeads,
    value: _ValueHeads,
    positions: Positions | None,
    window: int | None,
) -> tuple[_CachedKVHeads, _CachedValueHeads, Int[Array, "batch key_seq"], KeyValueCache]:
    """Write new keys and values; return all keys, values and positions to attend to, and the updated cache."""
    assert positions is not None  # see require_positions
    updated = cache.write(key, value, positions)
    if window is None or key.shape[1] * num_shards(key, "seq") == 1:
        return *updated.read(), updated
    # The ring buffer may already have dropped keys that the first new queries attend to.
    if not (axes := sharded_axes(cache.positions, "slots")):
        key, value, positions = (all_gather(x, "seq", axis=1) for x in (key, value, positions))
    elif not sharded_axes(positions, "seq"):  # all devices have the new tokens, and one of them attends to them
        positions = jnp.where(lax.axis_index(axes) == 0, positions, -1)
    append = lambda old, new: jnp.concatenate([old.astype(new.dtype), new], axis=1)
    old_key, old_value, old_positions = cache.read()
    return append(old_key, key), append(old_value, value), append(old_positions, positions), updated


def select_kv_heads(
    x: Float[Array, "batch seq units _"], heads: Float[Array, "batch heads_seq heads _"], group: int
) -> Float[Array, "batch seq _ _"]:
    """Select the KV heads (or groups) that this device's query `heads` use, `group` heads each.

    The identity, unless the KV heads, too few for the axis that shards heads, are replicated: then all heads of a
    device use one. Their number tells. That `x` varies over this axis does not: its tokens may be sharded over it.
    """
    if x.shape[2] * group == heads.shape[2]:
        return x
    index = shard_offset(heads, "heads", heads.shape[2]) // group
    return lax.dynamic_slice_in_dim(x, index, 1, axis=2)
