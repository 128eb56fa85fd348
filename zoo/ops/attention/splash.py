"""Splash attention: the block-sparse flash attention of JAX for TPUs, as an implementation of `attention`.

`jax.experimental.pallas.ops.tpu.splash_attention` visits only blocks of keys that a mask allows (sparse flash; Dao,
arXiv:2307.08691, for the recurrence) and keeps a log-sum-exp per query for a backward pass of its own. One call of its
multi-query kernel takes the query heads of one key head, so that keys and values are read once for all of them.

Its masks are known when the program is traced: causality and windows by position in the arrays. Segments are compared
in the kernel. It does not take positions, such as a KV cache has.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from ..implementations import find_kernel_obstacle
from ..platform import current_platform
from ..unchecked import call_kernel
from .grouped import group_size
from .mask import AttentionMask
from .request import AttentionRequest

_LANES = 128
"""Lanes of a TPU's vector registers: rows and columns of the smallest block."""
_LARGEST_BLOCK = 512
"""Queries and keys of a block: as in JAX's own benchmarks of the kernel, as far as they divide the length."""
_REFUSED = ("splash attention", 'set attention="grouped", as zoo.twice_differentiable(model) does')


def splash_attention(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch query_seq heads value_dim"]:
    """Compute attention by splash attention: compiled on TPUs, in Pallas' interpreter on CPUs.

    Queries are scaled before the kernel, in their dtype; scores and the softmax are float32.

    **Raises** `ValueError` with the reason of `find_splash_obstacle`.
    """
    request = AttentionRequest.from_arrays(query, key, value, attention_mask, soft_cap, sinks)
    if obstacle := find_splash_obstacle(request):
        raise ValueError(f"splash_attention cannot compute this, because {obstacle}")
    group = group_size(query, key)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scaled = (factor * query.astype(jnp.float32)).astype(query.dtype)
    query = rearrange(scaled, "batch seq (kv_heads group) dim -> batch kv_heads group seq dim", group=group)
    key, value = (rearrange(x, "batch seq kv_heads dim -> batch kv_heads seq dim") for x in (key, value))
    if sinks is None:
        sinks_by_head = None
    else:
        sinks_by_head = sinks.astype(jnp.float32).reshape(-1, group)
    static = _Static(group, request.query_seq, request.causal, request.window, soft_cap, current_platform() == "cpu")
    operands = query, key, value, sinks_by_head
    attend = functools.partial(_attend, static)
    output = call_kernel(attend, operands, attention_mask.query_segments, refused=_REFUSED)
    return rearrange(output, "batch kv_heads group seq dim -> batch seq (kv_heads group) dim").astype(value.dtype)


def find_splash_obstacle(request: AttentionRequest) -> str | None:
    """Return why `splash_attention` cannot compute a request, or None."""
    if reason := find_kernel_obstacle("tpu", "cpu"):
        return reason
    if request.has_positions:
        return "tokens have positions, and its masks compare places in the arrays"
    if request.has_decays:
        return "scores have decays"
    if request.block is not None:
        return "tokens see later ones of their block, and it has masks for causality and windows"
    if request.has_selection:
        return "queries select their keys, and its masks compare places in the arrays"
    if request.has_segments and not request.has_shared_segments:
        return "queries and keys have separate segments"
    if request.query_seq != request.key_seq:
        return f"{request.query_seq} queries and {request.key_seq} keys are not a square"
    if request.query_seq % _LANES:
        return f"{request.query_seq} tokens are not a multiple of {_LANES}"
    if request.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it computes in float32 or bfloat16, not {jnp.dtype(request.dtype).name}"
    return None


def find_splash_drawback(request: AttentionRequest) -> str | None:
    """Return why `"auto"` passes over `splash_attention` for a request, or None."""
    if current_platform() == "cpu":
        return "on CPUs kernels run in Pallas' interpreter"
    return None


class _Static(NamedTuple):
    """The static arguments that the kernel is made from."""

    group: int
    seq: int
    causal: bool
    window: int | None
    soft_cap: float | None
    is_interpreted: bool


def _attend(
    static: _Static, query: Array, key: Array, value: Array, sinks: Array | None, segments: Array | None
) -> Array:
    """Run the kernel of one key head, mapped over rows and key heads: "batch kv_heads group seq value_dim"."""
    # Pallas takes longer to import than the rest of the library.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    shape = (static.seq, static.seq)
    behind = None if static.window is None else static.window - 1
    if static.causal:
        mask = splash_attention_mask.LocalMask(shape, (behind, 0), 0)
    elif behind is not None:
        mask = splash_attention_mask.LocalMask(shape, (behind, behind), 0)
    else:
        mask = splash_attention_mask.FullMask(shape)
    block = next(size for size in (_LARGEST_BLOCK, _LARGEST_BLOCK // 2, _LANES) if static.seq % size == 0)
    run = splash_attention_kernel.make_splash_mqa(
        splash_attention_mask.MultiHeadMask([mask] * static.group),
        block_sizes=splash_attention_kernel.BlockSizes(block, block, block, block, block, block, block, block),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=static.soft_cap,
        interpret=static.is_interpreted,
    )

    def run_head(query: Array, key: Array, value: Array, sinks: Array | None, ids: Array | None) -> Any:
        segment_ids = None if ids is None else splash_attention_kernel.SegmentIds(ids, ids)
        return run(query, key, value, segment_ids, sinks)

    run_row = jax.vmap(run_head, in_axes=(0, 0, 0, 0, None))
    return jax.vmap(run_row, in_axes=(0, 0, 0, None, 0))(query, key, value, sinks, segments)
