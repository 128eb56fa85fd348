"""Differential attention: the difference of two softmax maps over one value."""

import math
from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.attention import ATTENTION
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim, buffer, full_precision, implementation_option
from zoo.shapes import HeadVectors, HiddenStates, KVHeads, ValueHeads

from ..abstract import AbstractLinear, AbstractNorm
from ..heads import split_heads
from ..kv_cache import KeyValueCache
from ..norm import RMSNorm
from ..token_info import TokenInfo
from .base import AbstractGroupedAttention, check_attention_sizes, make_projections, rotate


class DifferentialAttention(AbstractGroupedAttention):
    """Causal differential attention (Ye et al., arXiv:2410.05258, section 2.1). Each head has two queries and two keys
    of half its features, and one value:

        [q1, q2] = rotate(W_q x),    [k1, k2] = rotate(W_k x),    v = W_v x
        lambda = exp(lambda_q1 · lambda_k1) - exp(lambda_q2 · lambda_k2) + lambda_init
        y = W_out (1 - lambda_init) norm((softmax(q1 k1ᵀ scale + mask) - lambda softmax(q2 k2ᵀ scale + mask)) v)

    with lambda_init = 0.8 - 0.6 exp(-0.3 depth) and a norm of each head. The vectors of lambda are shared by all heads.

    The two maps are those of two query heads, [q1, 0] and [0, q2], with one key [k1, k2]. So one call of any
    implementation of attention computes both, on the meshes that `zoo.layers.Attention` supports, and one cache holds
    both keys. FLOPs per head for n queries and T keys: 8 n T head_dim, where two calls with keys of half the size would
    take 6 n T head_dim; kernels for values wider than keys are rare.
    """

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear
    norm: AbstractNorm
    lambda_q1: Float[Array, "head_dim"] = full_precision()
    lambda_k1: Float[Array, "head_dim"] = full_precision()
    lambda_q2: Float[Array, "head_dim"] = full_precision()
    lambda_k2: Float[Array, "head_dim"] = full_precision()
    lambda_init: Float[Array, ""] = buffer()

    head_dim: int = eqx.field(static=True)
    """Features of a head: of both its queries, or both its keys."""
    value_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Query heads per KV head, two for each head."""
    rotary: Rotary | None = eqx.field(static=True)
    """RoPE of half a head."""
    window: int | None = eqx.field(static=True)
    implementation: str | Callable = implementation_option(ATTENTION)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        depth: int = 0,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        rotary: Rotary | None = None,
        norm: Callable[..., AbstractNorm] | None = None,
        bias: bool = False,
        out_bias: bool = False,
        window: int | None = None,
        implementation: str | Callable = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `depth`: number of the layer, from 0. Layers of one factory, which are scanned, have one depth.
        - `head_dim`: features of both queries of a head, `embed / heads` by default. `value_dim`: `head_dim` by
          default.
        - `norm`: factory of the norm over the values of a head, called with their number and `features=`. An RMSNorm
          by default.

        Other options are as in `zoo.layers.Attention`. The vectors of lambda are initialized from a normal distribution
        with standard deviation 0.1.

        **Raises** `ValueError` for an odd head_dim, if kv_heads does not divide heads or heads does not divide embed,
        and for an empty window.
        """
        kv_heads, head_dim = check_attention_sizes(embed, heads, kv_heads, head_dim, window)
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} features of a head do not divide evenly over two queries")
        if value_dim is None:
            value_dim = head_dim
        if norm is None:
            norm = partial(RMSNorm, epsilon=1e-5)
        projection_key, lambda_key = jax.random.split(key)
        options = {"value_dim": value_dim, "bias": bias, "out_bias": out_bias, "out_scale": out_scale}
        projections = make_projections(embed, heads, kv_heads, head_dim, key=projection_key, **options)
        self.query, self.key, self.value, self.out = projections
        self.norm = norm(value_dim, features=Dim("value_dim"))
        vectors = 0.1 * jax.random.normal(lambda_key, (4, head_dim // 2), jnp.float32)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = vectors
        self.lambda_init = compute_lambda_init(depth)
        self.head_dim = head_dim
        self.value_dim = value_dim
        self.group = 2 * heads // kv_heads
        self.rotary = rotary
        self.window = window
        self.implementation = implementation

    def project(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None
    ) -> tuple[HeadVectors, KVHeads, ValueHeads]:
        query = split_heads(self.query(x), self.head_dim // 2)
        key = split_heads(self.key(x), self.head_dim // 2)
        value = split_heads(self.value(x), self.value_dim)
        query, key = rotate(query, key, self.rotary, x, info, state)
        return pad_queries(query), key.reshape(*key.shape[:2], -1, self.head_dim), value

    def score_options(self) -> dict[str, float]:
        return {"scale": (self.head_dim // 2) ** -0.5}

    def finish(self, mixed: Float[Array, "batch seq features"], x: HiddenStates) -> Float[Array, "batch seq _"]:
        maps = mixed.reshape(*mixed.shape[:2], -1, 2, self.value_dim).astype(jnp.float32)
        difference = maps[..., 0, :] - self.compute_lambda() * maps[..., 1, :]
        heads = (1 - self.lambda_init) * self.norm(difference)
        return heads.reshape(*mixed.shape[:2], -1).astype(mixed.dtype)

    def compute_lambda(self) -> Float[Array, ""]:
        """Return the weight of the second map, in float32."""
        products = ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
        first, second = (jnp.exp(jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32))) for q, k in products)
        return first - second + self.lambda_init


def pad_queries(query: Float[Array, "batch seq maps size"]) -> Float[Array, "batch seq maps _"]:
    """Return [q1, 0] for the first query of each head, and [0, q2] for the second one."""
    pairs = query.reshape(*query.shape[:2], -1, 2, 1, query.shape[-1])
    halves = jnp.eye(2, dtype=query.dtype)[:, :, None]
    return (halves * pairs).reshape(*query.shape[:3], -1)


def compute_lambda_init(depth: int) -> Float[Array, ""]:
    """Return the initial lambda of a layer, by its number from 0 (arXiv:2410.05258, section 2.1)."""
    return jnp.asarray(0.8 - 0.6 * math.exp(-0.3 * depth), jnp.float32)
