"""Scores of a lightning indexer, and their divergence from the attention that they stand for."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from zoo.ops.matmul import einsum_fp32_accum

from .mask import MASK_VALUE


def score_keys(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq head_dim"],
    weights: Float[Array, "batch query_seq heads"],
    *,
    scale: float = 1.0,
) -> Float[Array, "batch query_seq key_seq"]:
    """Return sum over heads h of weights_h relu(scale query_h . key), in float32 (DeepSeek-V3.2, arXiv:2512.02556,
    equation 1)."""
    products = einsum_fp32_accum("bshd,btd->bsht", query, key, dtype=jnp.float32) * scale
    return einsum_fp32_accum("bsh,bsht->bst", weights, jax.nn.relu(products))


def select_highest(
    scores: Float[Array, "batch query_seq key_seq"], mask: Bool[Array, "#batch _ _"], top: int
) -> Bool[Array, "batch query_seq key_seq"]:
    """Return True at the `top` highest scores of each query, among the keys that `mask` allows. Of equal scores, the
    first keys are selected. Where fewer are allowed, others are selected that the mask excludes."""
    scores = jnp.where(scores == 0, 0, scores)  # -0 and 0 are equal scores, and sorted apart
    _, best = lax.top_k(jnp.where(mask, scores, -jnp.inf), top)
    rows, queries = (lax.broadcasted_iota(jnp.int32, best.shape, axis) for axis in (0, 1))
    return jnp.zeros_like(scores, bool).at[rows, queries, best].set(True)


def indexer_divergence(
    attention: Float[Array, "batch query_seq key_seq"],
    scores: Float[Array, "batch query_seq key_seq"],
    mask: Bool[Array, "#batch query_seq key_seq"],
) -> Float[Array, "batch query_seq"]:
    """Return the KL divergence of each query, sum over keys of p (log p - log softmax(scores)), over the keys that
    `mask` allows (DeepSeek-V3.2, arXiv:2512.02556, equations 3 and 4).

    p is `attention`, the sum of probabilities over heads, divided by its sum over keys, a constant. A query without
    keys has 0.
    """
    target = jnp.where(mask, jax.lax.stop_gradient(attention), 0)
    total = target.sum(-1, keepdims=True)
    target = target / jnp.where(total > 0, total, 1)
    log_target = jnp.log(jnp.where(target > 0, target, 1))
    log_scores = jax.nn.log_softmax(jnp.where(mask, scores, MASK_VALUE), axis=-1)
    return jnp.where(target > 0, target * (log_target - log_scores), 0).sum(-1)
