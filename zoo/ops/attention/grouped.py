"""Grouped-query attention with all scores in memory: the fastest form for short sequences and for decoding."""

import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float

from zoo.ops.matmul import einsum_fp32_accum
from zoo.ops.normalization import max_last_dim

from .decays import DECAY_CHANNELS, split_decay_sums, subtract_decay_sums
from .mask import MASK_VALUE, AttentionMask, mask_heads, zero_masked_queries


def grouped_query_attention(
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
    """Compute grouped-query attention with all scores in memory, without repeating keys and values.

    The products run over [batch, kv_heads, group * query_seq, dim] in the inputs' dtype, so that bfloat16 uses matrix
    units; scores and softmax are float32. Causal attention without positions runs in up to four blocks of queries, each
    with the keys that its mask can allow: 10/16 of the products and of the softmax of a causal square. The attention
    weights of all blocks are residuals of the backward pass.
    """
    options = {"scale": scale, "soft_cap": soft_cap, "sinks": sinks, "decay_channels": decay_channels}
    return grouped_query_attention_with_lse(query, key, value, attention_mask, **options)[0]


def grouped_query_attention_with_lse(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    decay_channels: bool = False,
) -> tuple[Float[Array, "batch query_seq heads value_dim"], Float[Array, "batch query_seq heads"]]:
    """Compute grouped-query attention, and the log-sum-exp of the scores (sinks included) in float32.

    They merge as those of `blockwise_attention_with_lse`. The log-sum-exp of a fully masked query is about -1e30.
    """
    group = group_size(query, key)
    mask = attention_mask.materialize(query.shape[1], key.shape[1])
    key, value = (rearrange(x, "batch seq kv_heads dim -> batch kv_heads seq dim") for x in (key, value))
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(key.shape[1], group)
    features = query.shape[-1]
    query_sums = key_sums = None
    if decay_channels:
        _, query_sums = split_decay_sums(query)
        _, key_sums = split_decay_sums(key)
        # Zeros multiply the channels of keys: to leave these out, a cache would be copied for every token.
        features -= DECAY_CHANNELS
        query = query.at[..., features:].set(0)
    # The group is folded into the rows of one product: as a separate dim, XLA's CPU backend copies the weights.
    fold = "batch seq (kv_heads group) dim -> batch kv_heads (group seq) dim"
    unfold = "batch kv_heads (group seq) dim -> batch seq (kv_heads group) dim"
    outputs = []
    lses = []
    for queries, keys in make_query_blocks(attention_mask, query.shape[1], key.shape[2]):
        rows = rearrange(query[:, queries], fold, group=group)
        if mask is not None:
            # The barrier ties the constant to this layer. Otherwise JAX makes an array of it, as large as the scores,
            # once for all layers of a scan, and keeps it for the whole step.
            rows, masked_score = lax.optimization_barrier((rows, jnp.float32(MASK_VALUE)))
            masked_score = lax.stop_gradient(masked_score)
        scores = einsum_fp32_accum("bnrd,bnkd->bnrk", rows, key[:, :, keys], dtype=jnp.float32)
        scores = scale_scores(scores, features, scale, soft_cap)
        if query_sums is not None and key_sums is not None:
            row_sums = rearrange(query_sums[:, queries], fold, group=group)
            scores = scores + subtract_decay_sums(row_sums, key_sums[:, :, keys])
        if mask is not None:
            scores = jnp.where(_fold_heads(mask[..., queries, keys], key.shape[1], group), scores, masked_score)
        if sinks is None:
            row_sinks = None
        else:
            row_sinks = jnp.repeat(sinks, rows.shape[2] // group, axis=1)[..., None]
        weights, lse = _softmax_with_sinks(scores, row_sinks)
        output = einsum_fp32_accum("bnrk,bnkd->bnrd", weights.astype(value.dtype), value[:, :, keys])
        outputs.append(rearrange(output, unfold, group=group))
        lses.append(rearrange(lse, unfold, group=group))
    output = jnp.concatenate(outputs, axis=1)
    lse = jnp.concatenate(lses, axis=1)
    if not attention_mask.is_structural:
        output = zero_masked_queries(output, mask)
    return output, lse[..., 0]


def _fold_heads(
    mask: Bool[Array, "batch *groups queries keys"], kv_heads: int, group: int
) -> Bool[Array, "batch _ rows keys"]:
    """Return the mask of the rows of each key head, or one for all key heads."""
    if mask.ndim == 3:
        return jnp.tile(mask, (1, group, 1))[:, None]
    mask = mask_heads(mask, kv_heads * group)
    if mask.shape[1] == 1:
        return jnp.tile(mask, (1, 1, group, 1))
    return rearrange(mask, "batch (kv_heads group) queries keys -> batch kv_heads (group queries) keys", group=group)


def make_query_blocks(attention_mask: AttentionMask, query_seq: int, key_seq: int) -> list[tuple[slice, slice]]:
    """Split queries into up to four blocks of at least 64, each with the range of keys that its mask can allow.

    Returns one block of all queries and keys if the mask is not causal or has positions.
    """
    if attention_mask.query_positions is not None or not attention_mask.causal:
        return [(slice(0, query_seq), slice(0, key_seq))]
    size = max(-(-query_seq // 4), min(query_seq, 64))
    starts = range(0, query_seq, size)
    behind = key_seq if attention_mask.window is None else attention_mask.window - 1
    ends = [min(start + size, query_seq) for start in starts]
    unit = 1 if attention_mask.block is None else attention_mask.block
    last_keys = [min(-(-end // unit) * unit, key_seq) for end in ends]
    return [
        (slice(start, end), slice(max(0, start - behind), last))
        for start, end, last in zip(starts, ends, last_keys, strict=True)
    ]


def _softmax_with_sinks(
    scores: Float[Array, "batch kv_heads rows keys"], sinks: Float[Array, "kv_heads rows 1"] | None
) -> tuple[Float[Array, "batch kv_heads rows keys"], Float[Array, "batch kv_heads rows 1"]]:
    """Compute the softmax over keys in float32, with one sink per row if given, and the log-sum-exp."""
    highest = max_last_dim(lax.stop_gradient(scores))
    if sinks is not None:
        highest = jnp.maximum(highest, lax.stop_gradient(sinks))
    weights = jnp.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - highest)
    return weights / total, highest + jnp.log(total)


def scale_scores(
    scores: Float[Array, "..."], head_dim: int, scale: float | None, soft_cap: float | None
) -> Float[Array, "..."]:
    """Scale the products of queries and keys, and apply the soft cap if there is one."""
    factor = head_dim**-0.5 if scale is None else scale
    scores = scores * factor
    if soft_cap is None:
        return scores
    return soft_cap * jnp.tanh(scores / soft_cap)


def group_size(query: Float[Array, "..."], key: Float[Array, "..."]) -> int:
    """Return the number of query heads per key head. **Raises** `ValueError` if it is not an integer."""
    heads = query.shape[2]
    kv_heads = key.shape[2]
    if heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads do not divide evenly over {kv_heads} key heads.")
    return heads // kv_heads
