"""The base class of softmax attention with grouped queries, and the parts that variants of attention are made of:
projections, RoPE, the attention itself, and its KV cache."""

import abc
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from zoo.ops.attention import AttentionMask
from zoo.ops.attention.mask import count_block_ahead
from zoo.ops.rotary import Rotary, apply_rotary
from zoo.ops.sectioned_rotary import SectionedRotary
from zoo.parallel import Dim, all_gather, num_shards
from zoo.parallel.collectives import sharded_axes
from zoo.shapes import HeadVectors, HiddenStates, KVHeads, Positions, ResidualStream, ValueHeads

from ..abstract import AbstractLinear, AbstractMixer
from ..heads import select_kv_heads
from ..kv_cache import KeyValueCache, mark_overfull, require_positions
from ..linear import Linear, resolve_head_dim
from ..rotary import compute_cos_sin, rope_switch_length
from ..token_info import TokenInfo, token_positions
from .cached import cached_attention
from .context import causal_attention
from .tapped import VALUE_NAMES, select_attention, tap_heads

_CachedKVHeads = Float[Array, "batch key_seq kv_heads head_dim"]
_CachedValueHeads = Float[Array, "batch key_seq kv_heads value_dim"]


class AbstractGroupedAttention(AbstractMixer):
    """Causal attention in which `group` query heads share each key and value head:

        q, k, v = project(x)
        y = W_out finish(softmax(q kᵀ scale + mask) v, x)

    A variant defines `project`, and overrides `finish` and `score_options` where it differs from plain attention.
    """

    shards_sequence = True
    shards_state = True
    looks_ahead = True
    value_names = VALUE_NAMES

    key: eqx.AbstractVar[AbstractLinear]
    value: eqx.AbstractVar[AbstractLinear]
    out: eqx.AbstractVar[AbstractLinear]
    head_dim: eqx.AbstractVar[int]
    group: eqx.AbstractVar[int]
    rotary: eqx.AbstractVar[Rotary | None]
    window: eqx.AbstractVar[int | None]
    implementation: eqx.AbstractVar[str | Callable]

    @abc.abstractmethod
    def project(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None
    ) -> tuple[HeadVectors, KVHeads, ValueHeads]:
        """Return the queries, keys and values of the tokens `x`, with RoPE applied."""

    def score_options(self) -> dict[str, Any]:
        """Return the options `block`, `scale`, `soft_cap`, `sinks` and `decay_channels` of `attend` that this variant
        sets."""
        return {}

    def finish(self, mixed: Float[Array, "batch seq features"], x: HiddenStates) -> Float[Array, "batch seq features"]:
        """Transform the concatenated heads before the output projection."""
        return mixed

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None = None
    ) -> tuple[ResidualStream, KeyValueCache | None]:
        """With a KV cache as `state`, the new tokens follow the cached ones, at `info.positions`.

        **Raises** `ValueError` for a cache without positions.
        """
        query, key, value = self.project(x, info, state)
        mixed, state = attend(
            query,
            key,
            value,
            info,
            state,
            group=self.group,
            window=self.window,
            implementation=self.implementation,
            **self.score_options(),
        )
        if state is not None:
            state = state.note_shift(info)
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        return self.out(self.finish(mixed, x)), state

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> KeyValueCache:
        """Return an empty KV cache for `length` tokens, of at most `window` slots.

        RoPE with a scaling that depends on the sequence length takes `length`, unless
        `zoo.layers.kv_cache.set_rope_length` sets another.
        """
        kv_heads = self.key.out_size // self.head_dim
        value_dim = self.value.out_size // kv_heads
        cache = make_cache(batch, length, kv_heads, self.head_dim, dtype, window=self.window, value_dim=value_dim)
        if not isinstance(self.rotary, SectionedRotary):
            return cache
        return dataclasses.replace(cache, rope_shift=jnp.zeros(batch, jnp.int32))

    @property
    def rope_switch_length(self) -> int | None:
        return rope_switch_length(self.rotary)


def check_attention_sizes(
    embed: int, heads: int, kv_heads: int | None, head_dim: int | None, window: int | None = None
) -> tuple[int, int]:
    """Return the number of KV heads, `heads` by default, and the head dim, `embed / heads` by default.

    **Raises** `ValueError` if kv_heads does not divide heads or heads does not divide embed, and for an empty window.
    """
    if kv_heads is None:
        kv_heads = heads
    if heads % kv_heads:
        raise ValueError(f"{heads} heads do not divide evenly over {kv_heads} kv_heads")
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
    out_embed: int | None = None,
    source_embed: int | None = None,
    key: Key[Array, ""],
) -> tuple[Linear, Linear, Linear, Linear]:
    """Initialize the projections of attention: query, key, value and out. `value_dim` is `head_dim` by default, and
    `out_embed` is `embed`, as is `source_embed`, the features that keys and values are made of."""
    query_key, key_key, value_key, out_key = jax.random.split(key, 4)
    if value_dim is None:
        value_dim = head_dim
    if source_embed is None:
        source_embed = embed
    embed_dim = Dim("embed")
    project = partial(Linear, source_embed, in_=embed_dim, bias=bias)
    return (
        Linear(embed, heads * head_dim, in_=embed_dim, out=Dim("heads", head_dim), bias=bias, key=query_key),
        project(kv_heads * head_dim, out=Dim("kv_heads", head_dim), key=key_key),
        project(kv_heads * value_dim, out=Dim("kv_heads", value_dim), key=value_key),
        Linear(
            heads * value_dim,
            embed if out_embed is None else out_embed,
            in_=Dim("heads", value_dim),
            out=embed_dim,
            bias=out_bias,
            scale=out_scale,
            key=out_key,
        ),
    )


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
    rope_length = None
    if state is not None:
        rope_length = state.rope_length
    if isinstance(state, KeyValueCache):
        info = state.shift_positions(info)
    cos, sin = compute_cos_sin(rotary, x, info, rope_length)
    query = apply_rotary(query, cos, sin, interleaved=rotary.interleaved)
    return query, apply_rotary(key, cos, sin, interleaved=rotary.interleaved)


def attend(
    query: HeadVectors,
    key: KVHeads,
    value: ValueHeads,
    info: TokenInfo,
    state: KeyValueCache | None,
    *,
    group: int,
    window: int | None = None,
    block: int | None = None,
    **options: Any,
) -> tuple[HeadVectors, KeyValueCache | None]:
    """Attend causally within a sequence, or to the tokens of a KV cache as well, and return the updated cache.

    - `group`: query heads per KV head.
    - `block`: tokens of a block. Each attends to all tokens of its block.
    - `options`: `scale`, `soft_cap`, `sinks`, `decay_channels` and `implementation` of `zoo.ops.attention.attention`.

    **Raises** `ValueError` for a cache without positions; `NotImplementedError` for a cache and blocks.
    """
    if state is not None:
        require_positions(info, state)
        if block is not None and block > 1:
            raise NotImplementedError(
                f"a KV cache holds earlier tokens only, and with block={block} a token attends to the later ones of "
                "its block: call the model without states, on the text so far"
            )
    query, key, value = map(checkpoint_name, tap_heads(query, key, value), ("query", "key", "value"))
    if state is None:
        key, value = (select_kv_heads(x, query, group) for x in (key, value))
        is_sharded = bool(sharded_axes(query, "seq"))
        ahead = None
        if block is not None and (is_sharded or info.positions is not None):
            positions = token_positions(query[..., 0], info)
            ahead = jnp.broadcast_to(count_block_ahead(positions, block), query.shape[:2])
        if is_sharded or ahead is not None or info.lookahead is not None:
            further = {"ahead": ahead, "lookahead": info.lookahead}
            mixed = causal_attention(query, (key, value), info.segment_ids, window=window, **further, **options)
        else:
            mask = AttentionMask(True, window, info.segment_ids, info.segment_ids, block=block)
            mixed = select_attention()(query, key, value, mask, **options)
    else:
        key, value, key_positions, state = update_cache(state, key, value, info.positions, window)
        key, value = (select_kv_heads(x, query, group) for x in (key, value))
        places = {"query_positions": info.positions, "key_positions": key_positions}
        mask = AttentionMask(True, window, **places, lookahead=info.lookahead)
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
    value: ValueHeads,
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
