"""Softmax attention by its definition, which all implementations are tested against."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .grouped import group_size, scale_scores
from .mask import MASK_VALUE, AttentionMask


def reference_attention(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch query_seq heads value_dim"]:
    """Compute attention by its definition in float32, with keys and values repeated for every query head."""
    group = group_size(query, key)
    query, key, value_fp32 = (x.astype(jnp.float32) for x in (query, key, value))
    key, value_fp32 = (jnp.repeat(x, group, axis=2) for x in (key, value_fp32))
    mask = attention_mask.materialize(query.shape[1], key.shape[1])
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest")
    scores = scale_scores(scores, query.shape[-1], scale, soft_cap)
    if mask is None:
        mask = jnp.ones_like(scores, bool)
    else:
        mask = jnp.broadcast_to(mask[:, None], scores.shape)
    highest = jnp.max(scores, axis=-1, keepdims=True, where=mask, initial=MASK_VALUE)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(query.shape[2], 1, 1)
        highest = jnp.maximum(highest, sinks)
    highest = lax.stop_gradient(highest)
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - highest, 0)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - highest)
    weights = weights / jnp.where(total > 0, total, 1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value_fp32, precision="highest").astype(value.dtype)
