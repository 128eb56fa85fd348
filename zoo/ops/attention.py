"""Softmax attention: a reference, the default for grouped queries, and JAX's fused kernel, which must agree.

    scores  = soft_cap * tanh(scale * query . key / soft_cap)       without soft_cap: scale * query . key
    weights = softmax(scores) over the keys that the attention mask allows
    output  = sum(weights * value)

Attention sinks add one score s per head to the softmax denominator:

    weights = exp(scores) / (exp(s) + sum(exp(scores)))

All implementations take the same arguments (Vaswani et al., arXiv 1706.03762, section 3.2; grouped queries: Ainslie et
al., arXiv 2305.13245; windows: Beltagy et al., arXiv 2004.05150, section 3.1; the cap: Gemma 2, arXiv 2408.00118,
section 2; sinks: GPT-OSS, arXiv 2508.10925, section 2.2, after StreamingLLM, arXiv 2309.17453, section 3; with s = 0
"softmax off by one"):

- `query` head i attends to key and value head i // (heads // kv_heads).
- `attention_mask` is an `AttentionMask`. A fully masked query returns zeros and gets no gradient.
- `scale` is head_dim ** -0.5 by default.
- The softmax is computed in float32, including the sinks. The result has the dtype of `value`.

**Raises** `ValueError` where kv_heads does not divide heads, where the mask does not fit the arrays, and where an
implementation does not support an argument. In einsums b is batch, q query_seq, k key_seq, h heads, n kv_heads, r the
rows of a key head (its query heads times query_seq), d head_dim.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from zoo.ops.matmul import einsum_fp32_accum

_MASK_VALUE = -1e30  # finite, so that the softmax of a fully masked row is finite


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """An attention mask, described by rules: a query attends to the keys that all rules allow.

    - Positions default to the order in the arrays. A key at a negative position is masked: an empty slot of a KV cache,
      or padding.
    - `causal`: causal mask, key_position <= query_position.
    - `window`: sliding-window attention, query_position - key_position < window; if not causal,
      |query_position - key_position| < window.
    - Segments (packed sequences): only tokens with equal ids attend to each other.

    **Raises** `ValueError` where positions or segments are given for one side only, and for a window below 1.
    """

    causal: bool
    window: int | None = None
    query_segments: Int[Array, "batch query_seq"] | None = None
    key_segments: Int[Array, "batch key_seq"] | None = None
    query_positions: Int[Array, "batch query_seq"] | None = None
    key_positions: Int[Array, "batch key_seq"] | None = None

    def __post_init__(self):
        if (self.query_positions is None) != (self.key_positions is None):
            raise ValueError("attention: give positions for queries and keys, or for neither.")
        if (self.query_segments is None) != (self.key_segments is None):
            raise ValueError("attention: give segments for queries and keys, or for neither.")
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"attention: window is {self.window}; a query attends at least to itself, so it is at least 1."
            )

    @property
    def is_structural(self) -> bool:
        """Return True if the mask is the same for all rows and depends on causality and the window alone."""
        return self.query_positions is None and self.query_segments is None

    def materialize(self, query_seq: int, key_seq: int) -> Bool[Array, "rows query_seq key_seq"] | None:
        """Return the boolean mask, True where a query attends to a key, or None if nothing is masked.

        `rows` is batch, or 1 if all rows have the same mask.

        **Raises** `ValueError` if causality or a window needs positions: query_seq and key_seq differ and there are
        none.
        """
        rules = []
        if self.query_positions is not None and self.key_positions is not None:
            query_positions, key_positions = self.query_positions, self.key_positions
            rules.append(key_positions[:, None, :] >= 0)
        elif query_seq == key_seq or (not self.causal and self.window is None):
            query_positions, key_positions = jnp.arange(query_seq)[None], jnp.arange(key_seq)[None]
        else:
            raise ValueError(
                f"attention: {query_seq} queries and {key_seq} keys have no common order in time. Give positions."
            )
        age = query_positions[:, :, None] - key_positions[:, None, :]
        if self.causal:
            rules.append(age >= 0)
        if self.window is not None:
            rules.append((age if self.causal else jnp.abs(age)) < self.window)
        if self.query_segments is not None and self.key_segments is not None:
            rules.append(self.query_segments[:, :, None] == self.key_segments[:, None, :])
        if not rules:
            return None
        mask = functools.reduce(jnp.logical_and, rules)
        return jnp.broadcast_to(mask, (mask.shape[0], query_seq, key_seq))


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
    scores = _scale_scores(scores, query.shape[-1], scale, soft_cap)
    mask = jnp.ones_like(scores, bool) if mask is None else jnp.broadcast_to(mask[:, None], scores.shape)
    highest = jnp.max(scores, axis=-1, keepdims=True, where=mask, initial=_MASK_VALUE)
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(query.shape[2], 1, 1)
    highest = lax.stop_gradient(highest if sinks is None else jnp.maximum(highest, sinks))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - highest, 0)), 0)
    total = weights.sum(axis=-1, keepdims=True) + (0 if sinks is None else jnp.exp(sinks - highest))
    weights = weights / jnp.where(total > 0, total, 1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value_fp32, precision="highest").astype(value.dtype)


def grouped_query_attention(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch query_seq heads value_dim"]:
    """Compute grouped-query attention, the default implementation, without repeating keys and values.

    The products run over [batch, kv_heads, group * query_seq, dim] in the inputs' dtype, so that bfloat16 uses matrix
    units; scores and softmax are float32. Causal attention without positions runs in up to four blocks of queries, each
    with the keys that its mask can allow: 10/16 of the products and of the softmax of a causal square. The attention
    weights of all blocks are residuals of the backward pass.
    """
    group = group_size(query, key)
    mask = attention_mask.materialize(query.shape[1], key.shape[1])
    key, value = (rearrange(x, "batch seq kv_heads dim -> batch kv_heads seq dim") for x in (key, value))
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(key.shape[1], group)

    def attend(queries: slice, keys: slice) -> Array:
        # The group is folded into the rows of one product: as a separate dim, XLA's CPU backend copies the weights.
        rows = rearrange(
            query[:, queries], "batch seq (kv_heads group) dim -> batch kv_heads (group seq) dim", group=group
        )
        scores = einsum_fp32_accum("bnrd,bnkd->bnrk", rows, key[:, :, keys], dtype=jnp.float32)
        scores = _scale_scores(scores, query.shape[-1], scale, soft_cap)
        if mask is not None:
            scores = jnp.where(jnp.tile(mask[:, queries, keys], (1, group, 1))[:, None], scores, _MASK_VALUE)
        row_sinks = None if sinks is None else jnp.repeat(sinks, rows.shape[2] // group, axis=1)[..., None]
        weights = _softmax_with_sinks(scores, row_sinks).astype(value.dtype)
        output = einsum_fp32_accum("bnrk,bnkd->bnrd", weights, value[:, :, keys])
        return rearrange(output, "batch kv_heads (group seq) dim -> batch seq (kv_heads group) dim", group=group)

    output = jnp.concatenate(
        [attend(*block) for block in make_query_blocks(attention_mask, query.shape[1], key.shape[2])], axis=1
    )
    return output if attention_mask.is_structural else _zero_masked_queries(output, mask)


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
    return [(slice(start, end), slice(max(0, start - behind), end)) for start, end in zip(starts, ends, strict=True)]


def fused_attention(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> Float[Array, "batch query_seq heads value_dim"]:
    """Call `jax.nn.dot_product_attention`, on NVIDIA GPUs a flash-attention kernel that never materializes the weights.

    `implementation="cudnn"` selects that kernel; "xla" or None (the same in jax 0.10) is not fused. Causality and
    windows are passed as arguments, so that the kernel skips masked blocks; segments and positions as a boolean mask.

    **Raises** `ValueError` for a soft cap, for sinks and for values whose width is not that of keys: not supported.
    """
    if soft_cap is not None:
        raise ValueError("fused_attention: jax.nn.dot_product_attention has no soft_cap. Use grouped_query_attention.")
    if sinks is not None:  # its log-sum-exp would do, but has no gradient (jax 0.10)
        raise ValueError("fused_attention: jax.nn.dot_product_attention has no sinks. Use grouped_query_attention.")
    if value.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"fused_attention: jax.nn.dot_product_attention wants values as wide as keys, and they are "
            f"{value.shape[-1]} and {key.shape[-1]} wide. Use grouped_query_attention."
        )
    group_size(query, key)
    mask = attention_mask.materialize(query.shape[1], key.shape[1])
    attend = functools.partial(jax.nn.dot_product_attention, scale=scale, implementation=implementation)
    if mask is None or attention_mask.is_structural:
        behind = None if attention_mask.window is None else attention_mask.window - 1
        bounds = None if behind is None else (behind, 0 if attention_mask.causal else behind)
        return attend(query, key, value, is_causal=attention_mask.causal, local_window_size=bounds)
    return _zero_masked_queries(attend(query, key, value, mask=mask[:, None]), mask)


def _scale_scores(
    scores: Float[Array, "..."], head_dim: int, scale: float | None, soft_cap: float | None
) -> Float[Array, "..."]:
    """Scale the products of queries and keys, and apply the soft cap if there is one."""
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _softmax_with_sinks(
    scores: Float[Array, "batch kv_heads rows keys"], sinks: Float[Array, "kv_heads rows 1"] | None
) -> Float[Array, "batch kv_heads rows keys"]:
    """Compute the softmax over keys in float32, with one sink per row if given."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    highest = lax.stop_gradient(jnp.maximum(scores.max(axis=-1, keepdims=True), sinks))
    weights = jnp.exp(scores - highest)
    return weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sinks - highest))


def group_size(query: Float[Array, "..."], key: Float[Array, "..."]) -> int:
    """Return the number of query heads per key head. **Raises** `ValueError` if it is not an integer."""
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads do not share out over {kv_heads} key heads.")
    return heads // kv_heads


def _zero_masked_queries(output: Float[Array, "..."], mask: Bool[Array, "..."] | None) -> Float[Array, "..."]:
    """Zero the output of fully masked queries, whose softmax is uniform and meaningless."""
    return output if mask is None else jnp.where(mask.any(axis=-1)[:, :, None, None], output, 0)
