"""Softmax attention that may reuse the keys and values of an earlier layer."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from zoo.ops.attention import ATTENTION, AttentionMask
from zoo.ops.rotary import Rotary, apply_rotary
from zoo.parallel import Module, implementation_option
from zoo.shapes import HeadVectors, HiddenStates, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer, AbstractNorm
from ..heads import select_kv_heads, split_heads
from ..kv_cache import KeyValueCache, mark_overfull, require_positions
from ..rotary import compute_cos_sin, rope_switch_length
from ..token_info import TokenInfo
from .base import check_attention_sizes, make_cache, make_projections, rotate, update_cache
from .cached import cached_attention
from .context import causal_attention
from .tapped import VALUE_NAMES, tap_heads


class SharedKeyValues(Module):
    """Keys and values of one layer that later layers attend to: of a sequence, or of the whole KV cache."""

    key: Float[Array, "batch key_seq kv_heads head_dim"]
    value: Float[Array, "batch key_seq kv_heads value_dim"]
    positions: Int[Array, "batch key_seq"] | None
    """Positions of the slots of a cache; None for the sequence itself."""
    rope_length: Int[Array, ""] | None
    """Sequence length of the cache for RoPE that depends on it."""


_Shared = Mapping[str, SharedKeyValues]


class CrossLayerAttention(AbstractMixer):
    """Causal grouped-query attention with norms of queries, keys and values, which may share keys and values with other
    layers (CLA; Brandon et al., arXiv:2405.12981, section 2; Gemma 3n and 4):

        q = rotate(norm(W_query x)),    k = rotate(norm(W_key x)),    v = norm(W_value x)
        y = W_out softmax(q kᵀ scale + mask) v

    A layer that `stores` hands its keys and values on under that name, and one that `reuses` a name has neither
    projections of keys and values nor a KV cache of its own. Without a `value`, values are the keys before norm and
    RoPE. Window and supported meshes are as in `zoo.layers.Attention`. Only layers with a window look ahead
    (`TokenInfo.lookahead`), as in Gemma 4.
    """

    shards_sequence = True
    value_names = VALUE_NAMES
    shards_state = True
    looks_ahead = True

    query: AbstractLinear
    key: AbstractLinear | None
    value: AbstractLinear | None
    out: AbstractLinear
    query_norm: AbstractNorm
    key_norm: AbstractNorm | None
    value_norm: AbstractNorm | None

    head_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Query heads per KV head."""
    scale: float | None = eqx.field(static=True)
    rotary: Rotary | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    stores: str | None = eqx.field(static=True)
    reuses: str | None = eqx.field(static=True)
    implementation: str | Callable = implementation_option(ATTENTION)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        qk_norm: Callable[[], AbstractNorm],
        value_norm: Callable[[], AbstractNorm],
        kv_heads: int | None = None,
        head_dim: int | None = None,
        key_is_value: bool = False,
        stores: str | None = None,
        reuses: str | None = None,
        scale: float | int | None = None,
        rotary: Rotary | None = None,
        bias: bool = False,
        out_bias: bool = False,
        window: int | None = None,
        implementation: str | Callable = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `qk_norm`, `value_norm`: factories of norms over head_dim.
        - `key_is_value`: leave the projection of values out.
        - `stores`, `reuses`: name under which keys and values are handed on, or taken from an earlier layer.

        Other options are as in `zoo.layers.Attention`. **Raises** `ValueError` as it does, and for a layer that both
        stores and reuses.
        """
        if stores is not None and reuses is not None:
            raise ValueError(f"a layer that reuses the keys of {reuses!r} has none to store as {stores!r}")
        kv_heads, head_dim = check_attention_sizes(embed, heads, kv_heads, head_dim, window)
        options = {"bias": bias, "out_bias": out_bias, "out_scale": out_scale}
        projections = make_projections(embed, heads, kv_heads, head_dim, key=key, **options)
        self.query, self.key, self.value, self.out = projections
        self.query_norm = qk_norm()
        self.key_norm = qk_norm()
        self.value_norm = value_norm()
        if reuses is not None:
            self.key = self.value = self.key_norm = self.value_norm = None
        elif key_is_value:
            self.value = None
        self.head_dim = head_dim
        self.group = heads // kv_heads
        self.rotary = rotary
        self.window = window
        self.scale = None if scale is None else float(scale)
        self.stores = stores
        self.reuses = reuses
        self.implementation = implementation

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None = None
    ) -> tuple[ResidualStream, KeyValueCache | None]:
        """Return the output, and the updated KV cache. **Raises** `ValueError` as `mix` does."""
        y, (state, _) = self.mix(x, info, state, {})
        return y, state

    def mix(
        self, x: HiddenStates, info: TokenInfo, state: Any, shared: _Shared
    ) -> tuple[ResidualStream, tuple[Any, _Shared]]:
        """Return the output, the updated KV cache, and `shared` with the keys and values that this layer stores.

        With a KV cache as `state`, the new tokens follow the cached ones, at `info.positions`; the state of a layer
        that reuses keys is ().

        **Raises** `ValueError` for a cache without positions, and for keys of a name that no layer before has stored.
        """
        if self.reuses is not None and self.reuses not in shared:
            raise ValueError(f"this layer reuses the keys of {self.reuses!r}, which no layer before it has stored")
        query = split_heads(self.query(x), self.head_dim, self.query_norm)
        if self.reuses is None:
            query, keys, state = self._project(query, x, info, state)
        else:
            keys = shared[self.reuses]
            if self.rotary is not None:
                cos, sin = compute_cos_sin(self.rotary, x, info, keys.rope_length)
                query = apply_rotary(query, cos, sin, interleaved=self.rotary.interleaved)
        mixed = self._attend(query, keys, info)
        if isinstance(state, KeyValueCache):
            mixed = mark_overfull(mixed, state)
        if self.stores is not None:
            shared = {**shared, self.stores: keys}
        y = self.out(checkpoint_name(mixed, "attention").reshape(*mixed.shape[:2], -1))
        return checkpoint_name(y, "mixer_output"), (state, shared)

    def _project(
        self, query: HeadVectors, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None
    ) -> tuple[HeadVectors, SharedKeyValues, KeyValueCache | None]:
        """Return rotated queries, all keys and values that they attend to, and the updated cache."""
        require_positions(info, state)
        assert self.key is not None  # this layer does not reuse another layer's keys
        key = split_heads(self.key(x), self.head_dim)
        value = key
        if self.value is not None:
            value = split_heads(self.value(x), self.head_dim)
        if self.key_norm is not None:
            key = self.key_norm(key)
        if self.value_norm is not None:
            value = self.value_norm(value)
        query, key = rotate(query, key, self.rotary, x, info, state)
        query, key, value = map(checkpoint_name, tap_heads(query, key, value), ("query", "key", "value"))
        if state is None:
            return query, SharedKeyValues(key, value, None, None), None
        key, value, positions, state = update_cache(state, key, value, info.positions, self.window)
        return query, SharedKeyValues(key, value, positions, state.rope_length), state

    def _attend(self, query: HeadVectors, keys: SharedKeyValues, info: TokenInfo) -> HeadVectors:
        key, value = (select_kv_heads(x, query, self.group) for x in (keys.key, keys.value))
        options = {"scale": self.scale, "implementation": self.implementation}
        lookahead = None if self.window is None else info.lookahead
        if keys.positions is None:
            options["lookahead"] = lookahead
            return causal_attention(query, (key, value), info.segment_ids, window=self.window, **options)
        places = {"query_positions": info.positions, "key_positions": keys.positions, "lookahead": lookahead}
        return cached_attention(query, key, value, AttentionMask(True, self.window, **places), **options)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        """Return an empty KV cache for `length` tokens, of at most `window` slots; () for a layer that reuses keys."""
        if self.key is None:
            return ()
        kv_heads = self.key.out_size // self.head_dim
        return make_cache(batch, length, kv_heads, self.head_dim, dtype, window=self.window)

    @property
    def rope_switch_length(self) -> int | None:
        return rope_switch_length(self.rotary)
