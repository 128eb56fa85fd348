"""Softmax attention by its definition, which all implementations are tested against."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .decays import split_decay_sums, subtract_decay_sums
from .grouped import group_size, scale_scores
from .mask import MASK_VALUE, AttentionMask, mask_heads


def reference_attention(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    decay_channels: bool = False,
) -> Float[Array, "batch query_seq heads value_dim"]:
    """Compute attention by its definition in float32, with keys and values repeated for every query head."""
    options = {"scale": scale, "soft_cap": soft_cap, "sinks": sinks, "decay_channels": decay_channels}
    return average_values(attention_probabilities(query, key, attention_mask, **options), value)


def attention_probabilities(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    decay_channels: bool = False,
) -> Float[Array, "batch heads query_seq key_seq"]:
    """Compute the softmax over keys in float32, 0 for keys that are masked. With sinks, a row sums to less than 1."""
    query, key = (x.astype(jnp.float32) for x in (query, key))
    key = jnp.repeat(key, group_size(query, key), axis=2)
    query, query_sums = split_decay_sums(query, decay_channels)
    key, key_sums = split_decay_sums(key, decay_channels)
    mask = attention_mask.materialize(query.shape[1], key.shape[1])
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest")
    scores = scale_scores(scores, query.shape[-1], scale, soft_cap)
    if query_sums is not None and key_sums is not None:
        scores = scores + subtract_decay_sums(query_sums.swapaxes(1, 2), key_sums.swapaxes(1, 2))
    if mask is None:
        mask = jnp.ones_like(scores, bool)
    else:
        mask = jnp.broadcast_to(mask_heads(mask, query.shape[2]), scores.shape)
    highest = jnp.max(scores, axis=-1, keepdims=True, where=mask, initial=MASK_VALUE)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(query.shape[2], 1, 1)
        highest = jnp.maximum(highest, sinks)
    highest = lax.stop_gradient(highest)
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - highest, 0)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - highest)
    return weights / jnp.where(total > 0, total, 1)


def average_values(
    probabilities: Float[Array, "batch heads query_seq key_seq"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
) -> Float[Array, "batch query_seq heads value_dim"]:
    """Return the average of values by the probabilities of each query head, in the dtype of the values."""
    value_fp32 = jnp.repeat(value.astype(jnp.float32), probabilities.shape[1] // value.shape[2], axis=2)
    return jnp.einsum("bhqk,bkhd->bqhd", probabilities, value_fp32, precision="highest").astype(value.dtype)
