"""Softmax attention with forget gates, which lower the scores of earlier keys."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.attention import ATTENTION
from zoo.ops.attention.decays import (
    DECAY_CHANNELS,
    add_decay_sums,
    append_decay_sums,
    check_decay_dtype,
    split_decay_sums,
    sum_log_decays,
)
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim, implementation_option, reduce
from zoo.parallel.collectives import sharded_axes
from zoo.parallel.sequence import exclusive_prefix
from zoo.shapes import HeadVectors, HiddenStates, KVHeads, ValueHeads

from ..abstract import AbstractLinear, AbstractNorm
from ..heads import select_kv_heads, split_heads
from ..kv_cache import KeyValueCache
from ..linear import Linear
from ..token_info import TokenInfo
from .base import AbstractGroupedAttention, check_attention_sizes, make_cache, make_projections, rotate

_DecaySums = Float[Array, "batch seq kv_heads 2"]


class ForgettingAttention(AbstractGroupedAttention):
    """Causal attention with forget gates (FoX; Lin et al., arXiv:2503.02130, section 3.1):

        q, k = rotate(norm(W x)),    v = W_v x,    f = sigmoid(W_f x + b_f)
        y = W_out (sigmoid(W_gate x) * norm(softmax(q kᵀ scale + c_t - c_j + mask) v)),    c_t = log f_1 + ... + log f_t

    Norms, RoPE, the output gate and a sliding window are optional: the paper's FoX has none, its FoX (Pro) has the
    norms and the gate. The shift of keys and values of FoX (Pro) is left out. Grouped query heads share the forget gate
    of their KV head; with `gate_per_head` each has one of its own, and the cache copies keys and values for each.

    The log gates and their sums c are float32 whatever the compute dtype. `zoo.ops.attention.decays` says how keys, and
    so the KV cache, hold c; padding does not change it. The implementations are "grouped", "blockwise" and "reference".
    Supported meshes are as in `zoo.layers.Attention`. Where the sequence is sharded, a device adds the sums of all
    earlier shards: it receives 8 bytes per KV head and row, about log2(shards) times.
    """

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    forget: AbstractLinear
    gate: AbstractLinear | None
    out: AbstractLinear
    query_norm: AbstractNorm | None
    key_norm: AbstractNorm | None
    norm: AbstractNorm | None

    head_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Query heads per forget gate, and KV head of the cache."""
    copies: int = eqx.field(static=True)
    """Forget gates per KV head."""
    norm_over_heads: bool = eqx.field(static=True)
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
        rotary: Rotary | None = None,
        qk_norm: Callable[[], AbstractNorm] | None = None,
        norm_over_heads: Callable[..., AbstractNorm] | None = None,
        norm: Callable[..., AbstractNorm] | None = None,
        gate: bool = False,
        gate_per_head: bool = False,
        bias: bool = False,
        out_bias: bool = False,
        window: int | None = None,
        implementation: str | Callable = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `norm`: factory of the norm over the values of a head, called with their number and `features=`.
        - `gate`: add an output gate, one for each channel.
        - `gate_per_head`: one forget gate for each query head rather than each KV head.

        Other options and **raised** errors are as in `zoo.layers.Attention`. The bias of the forget gate is initialized
        to 0, the gate to a half.
        """
        kv_heads, head_dim = check_attention_sizes(embed, heads, kv_heads, head_dim, window)
        key, forget_key, gate_key = jax.random.split(key, 3)
        projections = make_projections(
            embed, heads, kv_heads, head_dim, bias=bias, out_bias=out_bias, out_scale=out_scale, key=key
        )
        self.query, self.key, self.value, self.out = projections
        gates = kv_heads
        unit = "kv_heads"
        if gate_per_head or heads == kv_heads:
            gates = heads
            unit = "heads"
        self.forget = Linear(embed, gates, in_=Dim("embed"), out=Dim(unit), bias=True, key=forget_key)
        self.gate = None
        if gate:
            self.gate = Linear(embed, heads * head_dim, in_=Dim("embed"), out=Dim("heads", head_dim), key=gate_key)
        self.query_norm = None if qk_norm is None else qk_norm()
        self.key_norm = None if qk_norm is None else qk_norm()
        if norm_over_heads is not None:
            self.query_norm = norm_over_heads(heads * head_dim, features=Dim("heads", head_dim))
            self.key_norm = norm_over_heads(kv_heads * head_dim, features=Dim("kv_heads", head_dim))
        self.norm_over_heads = norm_over_heads is not None
        self.norm = None if norm is None else norm(head_dim, features=Dim("head_dim"))
        self.head_dim = head_dim
        self.group = heads // gates
        self.copies = gates // kv_heads
        self.rotary = rotary
        self.window = window
        self.implementation = implementation

    def project(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None
    ) -> tuple[HeadVectors, KVHeads, ValueHeads]:
        query = self._split_heads(self.query(x), self.query_norm)
        key = self._split_heads(self.key(x), self.key_norm)
        value = split_heads(self.value(x), self.head_dim)
        query, key = rotate(query, key, self.rotary, x, info, state)
        if self.copies > 1:
            key, value = (select_kv_heads(units, query, self.copies) for units in (key, value))
            key, value = (jnp.repeat(units, query.shape[2] // units.shape[2], axis=2) for units in (key, value))
        sums = self._sum_log_gates(x, info, state)
        query_sums = jnp.repeat(select_kv_heads(sums, query, self.group), self.group, axis=2)
        # The query heads of a device may be fewer than a group: they then share one of the replicated KV heads.
        return append_decay_sums(query, query_sums[:, :, : query.shape[2]]), append_decay_sums(key, sums), value

    def score_options(self) -> dict[str, Any]:
        return {"scale": self.head_dim**-0.5, "decay_channels": True}

    def finish(self, mixed: Float[Array, "batch seq features"], x: HiddenStates) -> Float[Array, "batch seq features"]:
        if self.norm is not None:
            mixed = self.norm(split_heads(mixed, self.head_dim)).reshape(mixed.shape)
        if self.gate is not None:
            mixed = jax.nn.sigmoid(self.gate(x)) * mixed
        return mixed

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> KeyValueCache:
        """Return an empty KV cache for `length` tokens, of at most `window` slots, whose keys have the channels of
        `zoo.ops.attention.decays`. **Raises** `ValueError` for float16."""
        check_decay_dtype(dtype)
        kv_heads = self.forget.out_size
        size = self.head_dim + DECAY_CHANNELS
        return make_cache(batch, length, kv_heads, size, dtype, window=self.window, value_dim=self.head_dim)

    def _split_heads(
        self, x: Float[Array, "batch seq _"], norm: AbstractNorm | None
    ) -> Float[Array, "batch seq _ head_dim"]:
        """Reshape features to heads, with QK norm."""
        if norm is None or not self.norm_over_heads:
            return split_heads(x, self.head_dim, norm)
        return split_heads(norm(x), self.head_dim)

    def _sum_log_gates(self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None) -> _DecaySums:
        """Return the sums of the log gates of each token and all before it, in the cache and in earlier shards too."""
        log_gates = jax.nn.log_sigmoid(self.forget(x).astype(jnp.float32))
        if state is not None and info.positions is not None:
            log_gates = jnp.where((info.positions >= 0)[..., None], log_gates, 0)
        elif info.segment_ids is not None:
            log_gates = jnp.where((info.segment_ids > 0)[..., None], log_gates, 0)
        sums = sum_log_decays(log_gates)
        if axes := sharded_axes(x, "seq"):
            sums = add_decay_sums(exclusive_prefix(sums[:, -1:], add_decay_sums, axes), sums)
        if state is not None:
            sums = add_decay_sums(_find_latest_sums(state), sums)
        return sums


def _find_latest_sums(cache: KeyValueCache) -> Float[Array, "batch 1 kv_heads 2"]:
    """Return the sums of the latest token in a cache, whose slots may be sharded; zeros if it is empty."""
    latest = cache.positions.max(axis=1)
    slot = cache.positions.argmax(axis=1)
    key = jnp.take_along_axis(cache.key, slot[:, None, None, None], axis=2)
    _, sums = split_decay_sums(key)
    assert sums is not None  # keys have these channels
    is_latest = (latest >= 0) & (latest == reduce(latest, over="slots", by=jax.lax.pmax))
    return reduce(jnp.where(is_latest[:, None, None, None], sums, 0), over="slots").swapaxes(1, 2)
