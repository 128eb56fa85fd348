"""Attention whose keys and values are made of one short vector a token: multi-head latent attention."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.attention import AttentionMask, grouped_query_attention
from zoo.ops.rotary import Rotary, YarnScaling, apply_rotary, yarn_get_mscale
from zoo.parallel import Dim, implementation_option
from zoo.shapes import HeadVectors, HiddenStates

from .abstract import AbstractLinear, AbstractMixer, AbstractNorm
from .kv_cache import LatentCache, require_positions
from .linear import Linear
from .norm import RMSNorm
from .rotary import compute_cos_sin, rope_stable_length
from .token_info import TokenInfo

_LatentFeatures = Float[Array, "batch key_seq features"]


class LatentAttention(AbstractMixer):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

        c = norm(W_latent x)                             the latent of a token: what its keys and values are made of
        r = rotate(W_rotary_key x)                       the part of its key that turns with its position
        k_h = [W_key_up,h c, r], v_h = W_value_up,h c    of each head h; r is the same for all
        q_h = [a_h, rotate(b_h)]                         a_h and b_h the rows of W_query x that are head h's
        y = W_out [softmax(q_h k_hᵀ scale + mask) v_h of each head]

    With `query_latent` queries are made of a latent of their own, W_query_up norm(W_query_down x). Causal.

    Two forms agree. `expanded` writes out the keys and values of every head: for training and for prompts. `absorbed`
    does not: a_h · (W_key_up,h c) = (W_key_up,hᵀ a_h) · c, so that a query taken into the space of latents meets [c, r]
    as it is, and what it mixes there becomes values after: attention with a single key for all heads, for decoding.

    A cache holds [c, r] only: (latent + rotary.dim) numbers a token, where keys and values of as many heads are
    heads * (head_dim + rotary.dim + value_dim). DeepSeek-V3 (128 heads of 128, latents of 512, 64 of each key turned):
    576 numbers, 1,152 bytes in bfloat16, where plain attention with those heads has 2 * 128 * 128, 65,536 bytes.

    FLOPs of a head for n queries and T keys, beside the projections of the n tokens themselves, which both forms have:

        expanded   2 n T (head_dim + rotary.dim + value_dim) + 2 T latent (head_dim + value_dim)
        absorbed   4 n T (latent + rotary.dim) + 2 n latent (head_dim + value_dim)

    In training a key is written out once, for all that see it. From a cache all T are written out again for every
    call, so that one token costs 262,784 T with DeepSeek-V3's sizes, and absorbed 2,304 T.

    Heads are split over `tensor`, never cut; latents and rotary keys lie whole, and so does the cache. At rest `fsdp`
    splits what has the dim embed; matrices between latents and heads, too, in a layout that says so:
    `Layout(at_rest={"embed": ("fsdp",), "latent": ("fsdp",)})`.
    """

    query: AbstractLinear | None
    query_down: AbstractLinear | None
    query_norm: AbstractNorm | None
    query_up: AbstractLinear | None
    latent: AbstractLinear
    latent_norm: AbstractNorm
    rotary_key: AbstractLinear
    key_up: AbstractLinear
    value_up: AbstractLinear
    out: AbstractLinear

    head_dim: int = eqx.field(static=True)
    """Of each key, how many values do not turn."""
    rotary: Rotary = eqx.field(static=True)
    """Of those behind them, which do: `rotary.dim`."""
    scale: float = eqx.field(static=True)
    implementation: Callable = implementation_option()

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        latent: int,
        head_dim: int,
        rotary: Rotary,
        value_dim: int | None = None,
        query_latent: int | None = None,
        bias: bool = False,
        scale: float | int | None = None,
        epsilon: float = 1e-6,
        implementation: Callable = grouped_query_attention,
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `latent`, `query_latent`: how wide latents are; queries are made of the stream itself unless it is given.
        - `head_dim` values of each key and query do not turn, `rotary.dim` further ones do. Values are as wide as
          `head_dim` unless `value_dim` is given.
        - `bias`: of the matrices that read the stream or write to it, but not of `query`.
        - `scale`: of the scores, (head_dim + rotary.dim) ** -0.5 unless given, times the square of `yarn_magnitude` at
          `mscale_all_dim` where `rotary` is scaled by a `Yarn` that has one.
        - `epsilon`: of the norms over latents.
        - `form`: a function of `zoo.ops.attention` that takes values of another width than keys: `grouped` or `plain`.

        **Raises** `ValueError` for a size below 1.
        """
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"heads": heads, "latent": latent, "head_dim": head_dim, "value_dim": value_dim}
        sizes |= {} if query_latent is None else {"query_latent": query_latent}
        if wrong := [name for name, size in sizes.items() if size < 1]:
            raise ValueError(f"{wrong[0]} is {sizes[wrong[0]]}, and a size is at least 1")
        query_key, latent_key, rotary_key, key_key, value_key, out_key = jax.random.split(key, 6)
        down_key, up_key = jax.random.split(query_key)
        stream, latents, turning = Dim("embed"), Dim("latent"), Dim("head_dim")
        wide = head_dim + rotary.dim
        queries, keys, values = (Dim("heads", size) for size in (wide, head_dim, value_dim))
        read = partial(Linear, embed, in_=stream, bias=bias)
        self.query = self.query_down = self.query_norm = self.query_up = None
        if query_latent is None:
            self.query = Linear(embed, heads * wide, in_=stream, out=queries, key=query_key)
        else:
            self.query_down = read(query_latent, out=latents, key=down_key)
            self.query_norm = RMSNorm(query_latent, features=latents, epsilon=epsilon)
            self.query_up = Linear(query_latent, heads * wide, in_=latents, out=queries, key=up_key)
        self.latent = read(latent, out=latents, key=latent_key)
        self.latent_norm = RMSNorm(latent, features=latents, epsilon=epsilon)
        self.rotary_key = read(rotary.dim, out=turning, key=rotary_key)
        self.key_up = Linear(latent, heads * head_dim, in_=latents, out=keys, key=key_key)
        self.value_up = Linear(latent, heads * value_dim, in_=latents, out=values, key=value_key)
        self.out = Linear(heads * value_dim, embed, in_=values, out=stream, bias=bias, scale=out_scale, key=out_key)
        self.head_dim, self.rotary, self.implementation = head_dim, rotary, implementation
        self.scale = wide**-0.5 * _yarn_mscale(rotary) ** 2 if scale is None else float(scale)

    @property
    def rope_stable_length(self) -> int | None:
        return rope_stable_length(self.rotary)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> LatentCache:
        """An empty cache for `length` tokens. Where the rotation depends on the length of the text, it is that of
        `length` tokens from the first on."""
        return LatentCache.empty(batch, self.latent.out_size + self.rotary.dim, dtype, length)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: LatentCache | None = None
    ) -> tuple[HiddenStates, LatentCache | None]:
        """With a `state`, the tokens follow those that it holds, and `info.positions` says which is which. One such
        token is `absorbed`; several, and those without a state, are `expanded`.

        **Raises** `ValueError` for a state without positions.
        """
        require_positions(info, state)
        angles = compute_cos_sin(self.rotary, x, info, None if state is None else state.length)
        query, features = self.project_queries(x, angles), self.project_features(x, angles)
        sight, mix = AttentionMask(True, None, info.segment_ids, info.segment_ids), self.attend_expanded
        if state is not None:
            assert info.positions is not None  # or it was refused
            state = state.write(features, info.positions)
            features, mix = state.features, self.attend_absorbed if x.shape[1] == 1 else self.attend_expanded
            sight = AttentionMask(True, query_positions=info.positions, key_positions=state.positions)
        mixed = mix(query, features, sight)
        return self.out(mixed.reshape(*mixed.shape[:2], -1)), state

    def project_queries(self, x: HiddenStates, angles: tuple[Array, Array]) -> HeadVectors:
        """Of however many heads live here: `head_dim` values, and behind them those that were turned."""
        if self.query is not None:
            query = self.query(x)
        else:
            assert self.query_down is not None and self.query_norm is not None and self.query_up is not None
            query = self.query_up(self.query_norm(self.query_down(x)))
        query = query.reshape(*query.shape[:2], -1, self.head_dim + self.rotary.dim)
        still, turning = jnp.split(query, [self.head_dim], axis=-1)
        return jnp.concatenate([still, self.rotate(turning, angles)], axis=-1)

    def project_features(self, x: HiddenStates, angles: tuple[Array, Array]) -> _LatentFeatures:
        """What is remembered of each token: its latent, and behind it its rotary key."""
        rotary_key = self.rotate(self.rotary_key(x)[:, :, None], angles)[:, :, 0]
        return jnp.concatenate([self.latent_norm(self.latent(x)), rotary_key], axis=-1)

    def rotate(self, x: Float[Array, "batch seq heads _"], angles: tuple[Array, Array]) -> HeadVectors:
        return apply_rotary(x, *angles, interleaved=self.rotary.interleaved)

    def attend_expanded(self, query: HeadVectors, features: _LatentFeatures, mask: AttentionMask) -> HeadVectors:
        """What each head mixes of values, keys and values of all heads written out."""
        latent, rotary_key = jnp.split(features, [self.latent.out_size], axis=-1)
        of_heads = (*latent.shape[:2], query.shape[2])
        key, value = (up(latent).reshape(*of_heads, -1) for up in (self.key_up, self.value_up))
        rotary_key = jnp.broadcast_to(rotary_key[:, :, None], (*of_heads, self.rotary.dim))
        return self.implementation(query, jnp.concatenate([key, rotary_key], axis=-1), value, mask, scale=self.scale)

    def attend_absorbed(self, query: HeadVectors, features: _LatentFeatures, mask: AttentionMask) -> HeadVectors:
        """The same, by queries in the space of latents. They meet the features as these lie, and mix them whole: to cut
        the latents out of a cache would be to copy it at every token."""
        still, turned = jnp.split(query, [self.head_dim], axis=-1)
        query = jnp.concatenate([self.key_up.per_head_transposed(still), turned], axis=-1)
        key = features[:, :, None]
        mixed = self.implementation(query, key, key, mask, scale=self.scale)
        return self.value_up.per_head(mixed[..., : self.latent.out_size])


def _yarn_mscale(rotary: Rotary) -> float:
    """By how much YaRN as DeepSeek uses it stretches queries and keys beyond what cos and sin do already."""
    scaling = rotary.scaling
    if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim:
        return 1.0
    return yarn_get_mscale(scaling.factor, scaling.mscale_all_dim)
