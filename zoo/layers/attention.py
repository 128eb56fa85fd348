"""Softmax attention as a layer: projections, rotary positions, a cache."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from zoo.ops.attention import AttentionMask, grouped_query_attention
from zoo.ops.rotary import Rotary, apply_rotary
from zoo.parallel import Dim, full_precision, implementation_option, num_shards, shard_offset, sharded_axes
from zoo.shapes import HiddenStates

from .abstract import AbstractLinear, AbstractMixer, AbstractNorm
from .kv_cache import KeyValueCache, require_positions
from .linear import Linear, resolve_head_dim
from .rotary import compute_cos_sin, rope_stable_length
from .token_info import TokenInfo


class Attention(AbstractMixer):
    """Attention in which `heads` queries share `kv_heads` keys and values (Ainslie et al., arXiv:2305.13245).

    y = W_out softmax(q kᵀ scale + mask) v, with q, k = rotate(clip(norm(W x))) and v = clip(W x); norms, over head_dim
    or over all heads together, the clip to ±`clip` and the rotation where they are given. Causal; a `window` w lets a
    token see itself and the w - 1 before it; `soft_cap` c bounds scores to c tanh(score / c) (Gemma 2,
    arXiv:2408.00118, section 2). With `sinks` each head learns a score that joins its softmax and for which nothing is
    taken (GPT-OSS, arXiv:2508.10925, section 2.2). They keep their own dtype under `cast` and are used in float32;
    transformers rounds them, and all scores, to the dtype that it computes in.

    Heads are split over `tensor`, never cut. Where there are fewer kv_heads than devices along it, keys and values are
    computed whole, and each device takes those that its queries use.
    """

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear
    query_norm: AbstractNorm | None
    key_norm: AbstractNorm | None
    sinks: Float[Array, "heads"] | None = full_precision()

    head_dim: int = eqx.field(static=True)
    rotary: Rotary | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    soft_cap: float | None = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)
    clip: float | None = eqx.field(static=True)
    norm_over_heads: bool = eqx.field(static=True)
    implementation: Callable = implementation_option()

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
        implementation: Callable = grouped_query_attention,
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `kv_heads`: as many as `heads` unless given. `head_dim`: `embed / heads` unless given.
        - `qk_norm`: makes a norm over head_dim, one for queries and one for keys.
        - `whole_norm`: in its place, makes one over all heads together (OLMoE, arXiv:2409.02060), called with how many
          values they have and `features=`.
        - `scale`: of the scores, head_dim ** -0.5 unless given.
        - `sinks`: whether heads have them; they start at 0.
        - `form`: a function of `zoo.ops.attention`: `grouped`, `fused` (JAX's own, and cuDNN's) or `plain`.

        **Raises** `ValueError` where heads do not share out over kv_heads or embed, a window is empty, a clip is not
        above 0, or both norms are given.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ValueError(f"{heads} heads do not share out over {kv_heads} kv_heads")
        if window is not None and window < 1:
            raise ValueError(f"a window holds at least 1 token, its own, not {window}")
        if clip is not None and clip <= 0:
            raise ValueError(f"a clip bounds values to more than 0, not to {clip}")
        if qk_norm is not None and norm_over_heads is not None:
            raise ValueError("queries and keys have one norm: qk_norm, over head_dim, or whole_norm, over all heads")
        head_dim = resolve_head_dim(embed, heads, head_dim)
        query_key, key_key, value_key, out_key = jax.random.split(key, 4)
        stream, queries, keys = Dim("embed"), Dim("heads", head_dim), Dim("kv_heads", head_dim)
        self.query = Linear(embed, heads * head_dim, in_=stream, out=queries, bias=bias, key=query_key)
        self.key = Linear(embed, kv_heads * head_dim, in_=stream, out=keys, bias=bias, key=key_key)
        self.value = Linear(embed, kv_heads * head_dim, in_=stream, out=keys, bias=bias, key=value_key)
        self.out = Linear(heads * head_dim, embed, in_=queries, out=stream, bias=out_bias, scale=out_scale, key=out_key)
        self.query_norm = None if qk_norm is None else qk_norm()
        self.key_norm = None if qk_norm is None else qk_norm()
        if norm_over_heads is not None:
            self.query_norm = norm_over_heads(heads * head_dim, features=queries)
            self.key_norm = norm_over_heads(kv_heads * head_dim, features=keys)
        self.clip, self.norm_over_heads = None if clip is None else float(clip), norm_over_heads is not None
        self.sinks = jnp.zeros(heads) if sinks else None
        self.head_dim, self.rotary, self.window = head_dim, rotary, window
        self.soft_cap, self.scale, self.implementation = soft_cap, scale, implementation

    @property
    def rope_stable_length(self) -> int | None:
        return rope_stable_length(self.rotary)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> KeyValueCache:
        """An empty cache for `length` tokens; with a window, with no more slots than that.

        Where the rotation depends on the length of the text, it is that of `length` tokens from the first on: keys that
        a cache holds stay right while the text grows.
        """
        slots = min(length, self.window or length)
        kv_heads = self.key.out_size // self.head_dim
        return KeyValueCache.empty(batch, slots, kv_heads, self.head_dim, dtype, length)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None = None
    ) -> tuple[HiddenStates, KeyValueCache | None]:
        """With a `state`, the tokens follow those that it holds, and `info.positions` says which is which.

        **Raises** `ValueError` for a state without positions.
        """
        require_positions(info, state)
        query, key = self.split_heads(self.query(x), self.query_norm), self.split_heads(self.key(x), self.key_norm)
        value = self.split_heads(self.value(x), None)
        if self.rotary is not None:
            cos, sin = compute_cos_sin(self.rotary, x, info, None if state is None else state.length)
            query = apply_rotary(query, cos, sin, interleaved=self.rotary.interleaved)
            key = apply_rotary(key, cos, sin, interleaved=self.rotary.interleaved)
        mixed, state = self.attend(query, key, value, info, state)
        return self.out(mixed.reshape(*mixed.shape[:2], -1)), state

    def split_heads(
        self, x: Float[Array, "batch seq _"], norm: AbstractNorm | None
    ) -> Float[Array, "batch seq _ head_dim"]:
        """However many heads live here, with their norm and clip."""
        x = norm(x) if norm is not None and self.norm_over_heads else x
        x = x.reshape(*x.shape[:2], -1, self.head_dim)
        x = norm(x) if norm is not None and not self.norm_over_heads else x
        return x if self.clip is None else jnp.clip(x, -self.clip, self.clip)

    def attend(self, query, key, value, info, state):
        sight, seen = AttentionMask(True, self.window, info.segment_ids, info.segment_ids), (key, value)
        if state is not None:
            new = key, value, info.positions
            before, state = state, state.write(*new)
            *seen, positions = state.read()
            if self.window and query.shape[1] > 1:  # the ring may have dropped what the first of these still see
                held = before.read()
                *seen, positions = jax.tree.map(lambda a, b: jnp.concatenate([a.astype(b.dtype), b], 1), held, new)
            sight = AttentionMask(True, self.window, query_positions=info.positions, key_positions=positions)
        key, value = (select_kv_heads(x, query) for x in seen)
        options = {"scale": self.scale, "soft_cap": self.soft_cap, "sinks": self.sinks}
        return self.implementation(query, key, value, sight, **options), state


def select_kv_heads(
    x: Float[Array, "batch seq units _"],
    heads: Float[Array, "batch heads_seq heads _"],
    *,
    dim: str = "kv_heads",
) -> Float[Array, "batch seq _ _"]:
    """Of what `heads` share in groups, such as keys, that which the heads living here use: all of it, except where
    heads are split and the dim called `shared`, having too few, lies whole. Then a device's heads share one."""
    parts = num_shards(heads, "heads")
    if parts == 1 or sharded_axes(x, dim):
        return x
    index = shard_offset(heads, "heads", 1) * x.shape[2] // parts
    return lax.dynamic_slice_in_dim(x, index, 1, axis=2)
