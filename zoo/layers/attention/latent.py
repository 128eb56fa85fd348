"""Multi-head latent attention (MLA): keys and values are up-projections of one latent vector per token."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Key

from zoo.ops.attention import ATTENTION, AttentionMask
from zoo.ops.attention.reference import attention_probabilities
from zoo.ops.rotary import Rotary, YarnScaling, apply_rotary, yarn_get_mscale
from zoo.parallel import Dim, all_gather, full_precision, implementation_option, reduce
from zoo.shapes import HeadVectors, HiddenStates, Positions, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer, AbstractNorm
from ..kv_cache import LatentCache, mark_overfull, require_positions
from ..linear import Linear
from ..norm import RMSNorm
from ..query_scale import QueryScale, scale_queries
from ..rotary import compute_cos_sin, rope_switch_length
from ..token_info import TokenInfo
from .cached import cached_attention
from .context import causal_attention
from .tapped import PROBABILITIES

_LatentFeatures = Float[Array, "batch key_seq features"]


class LatentAttention(AbstractMixer):
    """Causal multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

        c = norm(W_latent x)                             latent of a token
        r = rotate(W_rotary_key x)                       rotary key, shared by all heads
        k_h = [W_key_up,h c, r], v_h = W_value_up,h c    of each head h
        q_h = [a_h, rotate(b_h)]                         a_h and b_h the rows of W_query x that are head h's
        y = W_out [softmax(q_h k_hᵀ scale + mask) v_h of each head]

    With `query_latent`, queries have a latent as well: W_query_up norm(W_query_down x). Normalized latents are
    multiplied by constants, `latent_scales` (LongCat-Flash, arXiv:2509.01322, section 2.3.1).

    Two modes agree. `attend_expanded` computes the keys and values of every head: for training and prefill.
    `attend_absorbed` uses a_h · (W_key_up,h c) = (W_key_up,hᵀ a_h) · c: queries are projected to the latent space, and
    attention has [c, r] as a single KV head, whose outputs W_value_up projects to values: for decoding.

    The cache holds [c, r]: latent + rotary.dim numbers per token, where keys and values of all heads would be
    heads * (head_dim + rotary.dim + value_dim). DeepSeek-V3 (128 heads of 128, latents of 512, 64 rotary features): 576
    numbers, 1,152 bytes in bfloat16, where multi-head attention with those heads has 2 * 128 * 128, 65,536 bytes.

    FLOPs per head for n queries and T keys, without the projections of the n tokens, which both modes have:

        expanded   2 n T (head_dim + rotary.dim + value_dim) + 2 T latent (head_dim + value_dim)
        absorbed   4 n T (latent + rotary.dim) + 2 n latent (head_dim + value_dim)

    In training each key is expanded once, for all queries. With a cache all T keys are expanded again for every call:
    one token costs 262,784 T with DeepSeek-V3's sizes, and 2,304 T absorbed.

    Heads are sharded over `tensor`; latents, rotary keys and the cache are replicated. At rest `fsdp` shards matrices
    along embed, and the up projections along latent with
    `Layout(parameters={"embed": ("fsdp",), "latent": ("fsdp",)})`. Where `context` shards a sequence, devices exchange
    latents and rotary keys in place of keys and values, unless the layout exchanges heads. It shards the cache too, and
    each device expands or absorbs its slots (`zoo.layers.attention.cached`).
    """

    shards_sequence = True
    value_names = (PROBABILITIES,)
    shards_state = True
    per_head_linears = ("key_up", "value_up")

    query: AbstractLinear | None
    query_down: AbstractLinear | None
    query_norm: AbstractNorm | None
    query_up: AbstractLinear | None
    latent: AbstractLinear
    latent_norm: AbstractNorm
    rotary_key: AbstractLinear
    key_up: AbstractLinear
    value_up: AbstractLinear
    gate: AbstractLinear | None
    sinks: Float[Array, "heads"] | None = full_precision()
    out: AbstractLinear

    head_dim: int = eqx.field(static=True)
    """Features per head without RoPE."""
    rotary: Rotary = eqx.field(static=True)
    """RoPE of the `rotary.dim` further features."""
    scale: float = eqx.field(static=True)
    query_scale: QueryScale | None = eqx.field(static=True)
    """Scale of queries by position (Mistral Small 4)."""
    latent_scales: tuple[float, float] = eqx.field(static=True)
    """Factors of the normalized latents: of queries, and of keys and values."""
    implementation: str | Callable = implementation_option(ATTENTION)

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
        gate: bool | Literal["channels"] = False,
        sinks: bool = False,
        scale: float | int | None = None,
        query_scale: QueryScale | None = None,
        latent_scales: tuple[float, float] = (1.0, 1.0),
        epsilon: float = 1e-6,
        implementation: str | Callable = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `latent`, `query_latent`: sizes of the latents; None projects queries directly.
        - `head_dim`: features per head without RoPE, in addition to the `rotary.dim` with it. `value_dim`: `head_dim`
          by default.
        - `bias`: of the projections from and to embed, except `query`.
        - `gate`: multiply each head's output by sigmoid(W_gate x), a number per head, or one per channel for "channels"
          (Qiu et al., arXiv:2505.06708).
        - `sinks`: add attention sinks, initialized to 0, as in `zoo.layers.Attention`.
        - `scale`: of the scores, (head_dim + rotary.dim) ** -0.5 by default, times the square of `yarn_get_mscale` for
          a `YarnScaling` with `mscale_all_dim`.
        - `query_scale`: scale of queries by position.
        - `latent_scales`: factors of the normalized latents of queries, and of keys and values.
        - `epsilon`: of the latent norms.
        - `implementation`: a name in `zoo.ops.attention.ATTENTION` that supports values of another size than keys, or a
          function with the arguments of `reference_attention`.

        **Raises** `ValueError` for a size below 1, another `gate`, and a factor of latents that queries do not have.
        """
        if gate not in (False, True, "channels"):
            raise ValueError(f'gate is False, True or "channels", not {gate!r}')
        if query_latent is None and latent_scales[0] != 1:
            raise ValueError(f"latent_scales={latent_scales}: queries have no latent without query_latent")
        if value_dim is None:
            value_dim = head_dim
        sizes = {"heads": heads, "latent": latent, "head_dim": head_dim, "value_dim": value_dim}
        if query_latent is not None:
            sizes["query_latent"] = query_latent
        if wrong := [name for name, size in sizes.items() if size < 1]:
            raise ValueError(f"{wrong[0]} is {sizes[wrong[0]]}, and a size is at least 1")
        query_key, latent_key, rotary_key, key_key, value_key, out_key = jax.random.split(key, 6)
        down_key, up_key = jax.random.split(query_key)
        embed_dim = Dim("embed")
        latent_dim = Dim("latent")
        rotary_dim = Dim("head_dim")
        query_dim = head_dim + rotary.dim
        queries, keys, values = (Dim("heads", size) for size in (query_dim, head_dim, value_dim))
        project = partial(Linear, embed, in_=embed_dim, bias=bias)
        self.query = self.query_down = self.query_norm = self.query_up = None
        if query_latent is None:
            self.query = Linear(embed, heads * query_dim, in_=embed_dim, out=queries, key=query_key)
        else:
            self.query_down = project(query_latent, out=latent_dim, key=down_key)
            self.query_norm = RMSNorm(query_latent, features=latent_dim, epsilon=epsilon)
            self.query_up = Linear(query_latent, heads * query_dim, in_=latent_dim, out=queries, key=up_key)
        self.latent = project(latent, out=latent_dim, key=latent_key)
        self.latent_norm = RMSNorm(latent, features=latent_dim, epsilon=epsilon)
        self.rotary_key = project(rotary.dim, out=rotary_dim, key=rotary_key)
        self.key_up = Linear(latent, heads * head_dim, in_=latent_dim, out=keys, key=key_key)
        self.value_up = Linear(latent, heads * value_dim, in_=latent_dim, out=values, key=value_key)
        self.gate = None
        if gate:
            gate_key = jax.random.fold_in(out_key, 1)
            channels = value_dim if gate == "channels" else 1
            self.gate = Linear(embed, heads * channels, in_=embed_dim, out=Dim("heads", channels), key=gate_key)
        self.sinks = jnp.zeros(heads, jnp.float32) if sinks else None
        self.out = Linear(heads * value_dim, embed, in_=values, out=embed_dim, bias=bias, scale=out_scale, key=out_key)
        self.head_dim = head_dim
        self.rotary = rotary
        self.implementation = implementation
        self.query_scale = query_scale
        self.latent_scales = latent_scales
        if scale is None:
            self.scale = query_dim**-0.5 * _yarn_mscale(rotary) ** 2
        else:
            self.scale = float(scale)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: LatentCache | None = None
    ) -> tuple[ResidualStream, LatentCache | None]:
        """With a cache as `state`, the new tokens follow the cached ones, at `info.positions`. A single token is
        decoded with `attend_absorbed`; prefill and training use `attend_expanded`.

        **Raises** `ValueError` for a cache without positions.
        """
        require_positions(info, state)
        rope_length = None if state is None else state.rope_length
        cos_sin = compute_cos_sin(self.rotary, x, info, rope_length)
        query = self.project_queries(x, cos_sin)
        features = self.project_features(x, cos_sin)
        if self.query_scale is not None:
            query = scale_queries(query, self.query_scale, x, info)
        if state is None:
            mixed = self.attend_to_sequence(query, features, info)
        else:
            assert info.positions is not None  # see require_positions
            state = state.write(features, info.positions)
            mixed = self.attend_to_cache(query, state, info.positions)
        return self.finish(mixed, x), state

    def finish(self, mixed: HeadVectors, x: HiddenStates) -> ResidualStream:
        """Return the output projection of the heads, gated if there is a gate."""
        if self.gate is not None:
            mixed = jax.nn.sigmoid(self.gate(x)).reshape(*mixed.shape[:3], -1) * mixed
        return self.out(mixed.reshape(*mixed.shape[:2], -1))

    def attend_to_sequence(
        self,
        query: HeadVectors,
        features: _LatentFeatures,
        info: TokenInfo,
        selected: Bool[Array, "batch seq _"] | None = None,
    ) -> HeadVectors:
        """Attend within the sequence, expanded; with `selected`, to these keys only."""
        options = {**self._options(), "selected": selected}
        return causal_attention(query, features, info.segment_ids, expand=self._expand(), **options)

    def attend_to_cache(
        self,
        query: HeadVectors,
        cache: LatentCache,
        positions: Positions,
        selected: Bool[Array, "batch _ slots"] | None = None,
    ) -> HeadVectors:
        """Attend to the slots of a cache, absorbed for a single token; with `selected`, to these slots only."""
        mask = AttentionMask(True, None, None, None, positions, cache.positions, selected)
        attend = self.attend_absorbed if query.shape[1] == 1 else self.attend_expanded
        return mark_overfull(attend(query, cache.features, mask), cache)

    def project_queries(self, x: HiddenStates, cos_sin: tuple[Array, Array]) -> HeadVectors:
        """Project queries; the last `rotary.dim` features of each head are rotated."""
        return self.expand_queries(self.compress_queries(x), cos_sin)

    def compress_queries(self, x: HiddenStates) -> Float[Array, "batch seq _"]:
        """Return the normalized and scaled latent of queries; `x` where they have none."""
        if self.query is not None:
            return x
        assert self.query_down is not None and self.query_norm is not None
        return self.latent_scales[0] * self.query_norm(self.query_down(x))

    def expand_queries(self, latent: Float[Array, "batch seq _"], cos_sin: tuple[Array, Array]) -> HeadVectors:
        """Return the queries of all heads, from the result of `compress_queries`."""
        project = self.query_up if self.query is None else self.query
        assert project is not None
        query = project(latent)
        query = query.reshape(*query.shape[:2], -1, self.head_dim + self.rotary.dim)
        unrotated, rotated = jnp.split(query, [self.head_dim], axis=-1)
        return jnp.concatenate([unrotated, self.rotate(rotated, cos_sin)], axis=-1)

    def project_features(self, x: HiddenStates, cos_sin: tuple[Array, Array]) -> _LatentFeatures:
        """Return [c, r]: the normalized and scaled latent and the rotary key of each token, as cached."""
        rotary_key = self.rotate(self.rotary_key(x)[:, :, None], cos_sin)[:, :, 0]
        latent = self.latent_scales[1] * self.latent_norm(self.latent(x))
        return jnp.concatenate([latent, rotary_key], axis=-1)

    def rotate(self, x: Float[Array, "batch seq heads _"], cos_sin: tuple[Array, Array]) -> HeadVectors:
        return apply_rotary(x, *cos_sin, interleaved=self.rotary.interleaved)

    def attend_expanded(self, query: HeadVectors, features: _LatentFeatures, mask: AttentionMask) -> HeadVectors:
        """Attend with keys and values of all heads, expanded from the latents."""
        key, value = self._expand()(features)
        return cached_attention(query, key, value, mask, **self._options())

    def sum_probabilities(
        self, query: HeadVectors, features: _LatentFeatures, mask: AttentionMask
    ) -> Float[Array, "batch seq key_seq"]:
        """Return the probabilities of attention within the sequence, summed over all heads, as a constant. Where the
        sequence is sharded, `mask` covers the keys of the whole row."""
        key, _ = self._expand()(all_gather(features, "seq", axis=1))
        query, key, sinks = lax.stop_gradient((query, key, self.sinks))
        return reduce(attention_probabilities(query, key, mask, scale=self.scale, sinks=sinks).sum(1), over="heads")

    def _options(self) -> dict[str, Any]:
        return {"scale": self.scale, "sinks": self.sinks, "implementation": self.implementation}

    def _expand(self) -> Callable[[_LatentFeatures], tuple[HeadVectors, HeadVectors]]:
        """Return the map from latents to the keys and values of all heads, as a pytree of its parameters."""
        return jax.tree_util.Partial(_expand_latents, self.key_up, self.value_up, self.head_dim, self.rotary.dim)

    def attend_absorbed(self, query: HeadVectors, features: _LatentFeatures, mask: AttentionMask) -> HeadVectors:
        """Attend in the latent space, with the up projections absorbed into queries and outputs.

        Keys double as values, rotary keys included: slicing the latents off would copy the cache for every token.
        """
        unrotated, rotated = jnp.split(query, [self.head_dim], axis=-1)
        query = jnp.concatenate([self.key_up.per_head_transposed(unrotated), rotated], axis=-1)
        key = features[:, :, None]
        mixed = cached_attention(query, key, key, mask, **self._options())
        return self.value_up.per_head(mixed[..., : self.latent.out_size])

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> LatentCache:
        """Return an empty cache for `length` tokens. Length-dependent RoPE scalings rotate all keys as in a sequence of
        that length."""
        return LatentCache.empty(batch, self.latent.out_size + self.rotary.dim, dtype, length)

    @property
    def rope_switch_length(self) -> int | None:
        return rope_switch_length(self.rotary)


def _expand_latents(
    key_up: AbstractLinear, value_up: AbstractLinear, head_dim: int, rotary_dim: int, features: _LatentFeatures
) -> tuple[HeadVectors, HeadVectors]:
    """Return keys and values of all heads: [W_key_up c, r], and W_value_up c."""
    latent, rotary_key = jnp.split(features, [features.shape[-1] - rotary_dim], axis=-1)
    key = key_up(latent).reshape(*latent.shape[:2], -1, head_dim)
    heads = key.shape[2]
    rotary_key = jnp.broadcast_to(rotary_key[:, :, None], (*key.shape[:3], rotary_dim))
    return jnp.concatenate([key, rotary_key], axis=-1), value_up(latent).reshape(*latent.shape[:2], heads, -1)


def _yarn_mscale(rotary: Rotary) -> float:
    """Return DeepSeek's YaRN scale of queries and keys, applied on top of the scale of cos and sin."""
    scaling = rotary.scaling
    if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim:
        return 1.0
    return yarn_get_mscale(scaling.factor, scaling.mscale_all_dim)
