"""JAX's own attention, on NVIDIA GPUs cuDNN's flash-attention kernel."""

import functools
from typing import Literal

import jax
from jaxtyping import Array, Float

from .mask import AttentionMask, zero_masked_queries
from .reference import group_size


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
    return zero_masked_queries(attend(query, key, value, mask=mask[:, None]), mask)
