"""Attention by `tokamax.dot_product_attention`: on TPUs splash attention, on NVIDIA GPUs Pallas kernels for Mosaic.

Causality is an argument, with which kernels skip the blocks above the diagonal. So is a sliding window where a kernel
takes one, on Hopper and on CPUs. Segments, positions, selections, and a window elsewhere are a boolean mask, one for
all heads: batch * query_seq * key_seq bytes.
"""

import functools
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..platform import current_platform
from ..tokamax import call_tokamax, find_capability, find_tokamax_obstacle
from .grouped import group_size
from .mask import AttentionMask, mask_heads, zero_masked_queries
from .request import AttentionRequest

_LANES = 128
"""Queries, and keys, of the smallest block of a TPU kernel."""
_INSTEAD = 'set attention="grouped", as zoo.twice_differentiable(model) does'


def tokamax_attention(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch query_seq heads value_dim"]:
    """Compute attention by tokamax: by Pallas kernels on TPUs and NVIDIA GPUs, by XLA on CPUs.

    **Raises** `ValueError` with the reason of `find_tokamax_attention_obstacle`, and with tokamax's own.
    """
    request = AttentionRequest.from_arrays(query, key, value, attention_mask, soft_cap, sinks)
    if obstacle := find_tokamax_attention_obstacle(request):
        raise ValueError(f"tokamax_attention cannot compute this, because {obstacle}")
    group_size(query, key)
    options: dict[str, Any] = {"scale": scale, "logits_soft_cap": soft_cap, "implementation": _choose_kernel()}
    options["is_causal"] = attention_mask.causal and not request.has_positions and attention_mask.block is None
    materialized = attention_mask.materialize(request.query_seq, request.key_seq)
    mask = None
    if not attention_mask.is_structural:
        mask = materialized
    elif attention_mask.window is not None and _takes_windows():
        behind = attention_mask.window - 1
        options["local_window_size"] = (behind, 0 if attention_mask.causal else behind)
    elif attention_mask.window is not None:
        mask = materialized
    operands = query, key, value
    attend = functools.partial(_call_attention, options)
    output = call_tokamax(attend, operands, mask, operation="attention", instead=_INSTEAD)
    return zero_masked_queries(output, mask)


def find_tokamax_attention_obstacle(request: AttentionRequest) -> str | None:
    """Return why `tokamax_attention` cannot compute a request, or None."""
    if reason := find_tokamax_obstacle("cpu", "gpu", "tpu"):
        return reason
    if request.has_sinks:
        return "there are attention sinks"
    if request.has_decays:
        return "scores have decays"
    if not request.has_one_dtype:
        return "queries, keys and values have several dtypes"
    platform = current_platform()
    dtypes = (jnp.bfloat16, jnp.float16) if platform == "gpu" else (jnp.float32, jnp.bfloat16)
    if request.dtype not in dtypes:
        names = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        return f"it computes in {names} on {platform.upper()}s, not in {jnp.dtype(request.dtype).name}"
    if platform == "tpu" and (request.query_seq % _LANES or request.key_seq % _LANES):
        return f"{request.query_seq} queries and {request.key_seq} keys are not multiples of {_LANES}"
    return None


def _choose_kernel() -> str:
    """Return tokamax's name of the kernel: Mosaic's on TPUs, Hopper and Blackwell, Triton's on other GPUs, for which
    Mosaic's has no gradient."""
    platform = current_platform()
    if platform == "cpu":
        return "xla"
    if platform == "gpu" and not 9 <= find_capability() < 11:
        return "triton"
    return "mosaic"


def _takes_windows() -> bool:
    """Return True where a kernel takes a window as an argument. On Blackwell it does not with the blocks that tokamax
    chooses there (0.0.17)."""
    return current_platform() == "cpu" or (current_platform() == "gpu" and find_capability() < 10)


def _call_attention(
    options: dict[str, Any], tokamax: ModuleType, query: Array, key: Array, value: Array, mask: Array | None
) -> Array:
    if mask is not None:
        # A query without keys attends to all of them: its softmax is finite, and the caller zeros its output.
        mask = mask_heads(mask | ~mask.any(axis=-1, keepdims=True), query.shape[2])
    return tokamax.dot_product_attention(query, key, value, mask=mask, **options)
