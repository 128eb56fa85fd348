"""JAX's own attention, on NVIDIA GPUs cuDNN's flash-attention kernel."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # no public function tells what it refuses
from jaxtyping import Array, Float

from ..implementations import find_kernel_obstacle
from .grouped import group_size
from .mask import AttentionMask, mask_heads, zero_masked_queries
from .request import AttentionRequest


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

    **Raises** `ValueError` for a soft cap, for sinks, and for values that are not as wide as keys: not supported.
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
        bounds = None
        if attention_mask.window is not None:
            behind = attention_mask.window - 1
            ahead = 0 if attention_mask.causal else behind
            bounds = (behind, ahead)
        return attend(query, key, value, is_causal=attention_mask.causal, local_window_size=bounds)
    return zero_masked_queries(attend(query, key, value, mask=mask_heads(mask, query.shape[2])), mask)


def find_cudnn_obstacle(request: AttentionRequest) -> str | None:
    """Return why cuDNN's flash attention cannot compute a request, as JAX would refuse it, or None.

    cuDNN reads sequence lengths as padding to the right, which serves neither packed rows nor padding to the left; and
    when the program is traced, it is not known whether a mask is one of these. Segments and positions therefore become
    a boolean mask, which JAX adds to the scores.
    """
    if reason := find_kernel_obstacle("gpu"):
        return reason
    if request.soft_cap is not None:
        return "scores have a soft cap"
    if request.has_sinks:
        return "there are attention sinks"
    if request.has_decays:
        return "scores have decays"
    if request.value_dim != request.head_dim:
        return f"values are {request.value_dim} wide and keys {request.head_dim}"
    if request.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, not {jnp.dtype(request.dtype).name}"
    if not request.has_one_dtype:
        return "queries, keys and values have several dtypes"
    if request.window is not None and not request.causal and request.is_structural:
        return "the window has two sides"
    if not request.is_structural and (request.query_seq % 2 or request.key_seq % 2):
        return f"its masks are even in length, and this one is {request.query_seq} x {request.key_seq}"
    if reason := _find_missing_library():
        return reason
    widest = 256 if cudnn.check_compute_capability("9.0") else 128
    if request.head_dim > widest or request.head_dim % 8:
        return f"heads have {request.head_dim} features, and it takes a multiple of 8 up to {widest} on this GPU"
    return None


def _find_missing_library() -> str | None:
    """Return an obstacle where JAX finds no cuDNN."""
    try:
        cudnn.check_cudnn_version()
    except RuntimeError:
        return "JAX finds no cuDNN here"
    return None
