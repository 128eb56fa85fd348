"""The delta rule and the gated delta rule as Pallas kernels for TPUs.

    S_t = exp(g_t) S_{t-1};   S_t += k_t (beta_t (v_t - k_t · S_t))ᵀ;   o_t = scale q_t · S_t

Opt-in: equal to the other implementations in Pallas' interpreter, and compiled for v5e ahead of time, but not yet
measured on hardware.

For a chunk of C tokens with G_i = g_0 + ... + g_i, let D_ij = exp(G_i - G_j) for j <= i, f_i = exp(G_i), h_j =
exp(G_last - G_j), and S the state before the chunk. Then (Gated DeltaNet, arXiv:2412.06464, section 3.3; without
decays: arXiv:2406.06484, section 3.2)

    T  = (I - L)^-1                        L_ij = -beta_i D_ij k_i · k_j for j < i
    U  = T (beta (v - f K S))              [C, value_dim]
    o  = scale (f Q S + (D * Q Kᵀ) U)
    S' = f_last S + (h K)ᵀ U

Each exponent is a sum over the tokens in between, never a difference of cumulative sums (`common.compute_decays`), and
T is assembled from blocks, as in `zoo.ops.recurrence.triangular`. `chunked_delta` applies T to keys and values of all
chunks before it knows their states; here the state is known, and T is applied only to the errors v - f K S.

The grid is (batch, heads, chunks). The chunks of a head run in order, and the state stays in VMEM, in the block of the
last state. For the backward pass, the forward pass saves the state before each chunk, in float32, and T, in the dtype
of the operands; all else is recomputed from the operands. The backward pass runs from the last chunk to the first, with
the cotangent of the state in place of the state. With dU = (D * Q Kᵀ)ᵀ do + h K dS' and dY = Tᵀ dU, the other
cotangents are products of do, dS', dU and dY with U, K, Q and S: dL = dY Uᵀ, dv = beta dY, and so on. The cotangents of
the log decays are sums of E_ij = dL/dD_ij D_ij over all j < t <= i, without differences.

T is computed once, and not in the backward pass again, because it is most of the work: 2 log2(C) products in float32,
each in turn. In bfloat16 all other products take bfloat16 operands and accumulate in float32, and states, decays,
errors v - f K S and T are float32 before they are rounded for a product; float32 operands are multiplied in float32
(`Precision.HIGHEST`).

FLOPs per token and head, with K = key_dim and V = value_dim: forward 4 C K + 4 C V + 6 K V, and 4 C^2 log2(C) for T;
backward 12 C K + 10 C V + 14 K V. Bytes in HBM per token and head, with operands of w bytes: forward w (2 K + 2 V),
and 4 K V / C + w C of residuals if it is differentiated; backward these, and w (4 K + 3 V). There the last dim of an
array is padded to 128, and operands are first transposed to [batch, heads, seq, dim], which moves 4 w (K + V) more.

Decays per key channel (Kimi Delta Attention) are refused: their triangles are not products of K Kᵀ with decays. Several
steps per token (DeltaProduct) are rows of their own whose queries are zero.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.shapes import MatrixState, Queries, SegmentIds, Values

from ...custom_vjps import refuse_forward_mode
from ...varying import align_varying
from ..chunks import count_segment_starts, split_into_chunks
from ..select import RecurrenceRequest
from .common import REFUSED, find_platform_obstacle, round_up_to_lanes

_CHUNK_SIZE = 64
_SMALLEST_CHUNK = 16
"""Rows of the smallest tile of bfloat16."""
_LARGEST_CHUNK = 128
_VMEM = 16 * 2**20
"""Bytes of VMEM that the compiler gives a kernel."""


def find_delta_rule_obstacle(request: RecurrenceRequest, chunk_size: int = _CHUNK_SIZE) -> str | None:
    """Return why `pallas_delta_rule` cannot compute a request, or None."""
    if obstacle := find_platform_obstacle():
        return obstacle
    if request.decay == "channel":
        return "it takes one decay per head, not one per key channel"
    if request.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it computes in float32 or bfloat16, not {jnp.dtype(request.dtype).name}"
    if chunk_size & (chunk_size - 1) or not _SMALLEST_CHUNK <= chunk_size <= _LARGEST_CHUNK:
        return f"chunk_size is {chunk_size}, and not a power of two from {_SMALLEST_CHUNK} to {_LARGEST_CHUNK}"
    if (needed := _bound_vmem(request, chunk_size)) > _VMEM:
        return (
            f"a chunk of {chunk_size} rows with keys of {request.key_dim} and values of {request.value_dim} takes "
            f"{needed / 2**20:.1f} MiB of VMEM, and a kernel has {_VMEM / 2**20:.0f}"
        )
    return None


def _bound_vmem(request: RecurrenceRequest, size: int) -> int:
    """Bound the VMEM that the backward kernel takes: two buffers per block, and its temporaries.

    Kernels for v5e bounded by 14.5 MiB compiled; of the kernels bounded by 17 MiB or more, the float32 ones did not.
    """
    key = round_up_to_lanes(request.key_dim)
    value = round_up_to_lanes(request.value_dim)
    width = jnp.dtype(request.dtype).itemsize
    state = 4 * request.key_dim * value
    pairs = size * round_up_to_lanes(size)
    blocks = 3 * state + width * (size * (4 * key + 3 * value) + pairs)
    return 2 * blocks + 4 * (6 * pairs + 4 * size * (key + value)) + 3 * state


def pallas_delta_rule(
    query: Queries,
    key: Float[Array, "batch rows heads key_dim"],
    value: Float[Array, "batch rows heads value_dim"],
    beta: Float[Array, "batch rows heads"],
    log_decay: Float[Array, "batch seq heads"] | Queries | None = None,
    *,
    scale: float | int | None = None,
    state: MatrixState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = _CHUNK_SIZE,
) -> tuple[Values, MatrixState]:
    """Compute `delta_rule`, with `log_decay` `gated_delta_rule`, and with several rows per token `gated_delta_product`:
    returns the outputs and the last state.

    `scale` defaults to key_dim ** -0.5. A sequence shorter than a chunk takes a smaller one. A custom VJP: forward-mode
    differentiation raises `TypeError`.

    **Raises** `ValueError` with the reason of `find_delta_rule_obstacle`, or if rows are not a multiple of seq.
    """
    seq = query.shape[1]
    rows = key.shape[1]
    steps = rows // seq
    if rows != seq * steps:
        raise ValueError(f"pallas_delta_rule: {rows} rows of keys are not a multiple of {seq} tokens")
    dtype = jnp.result_type(query, key, value)
    out_dtype = value.dtype
    request = RecurrenceRequest.from_heads(query, value, log_decay, steps=steps)
    if obstacle := find_delta_rule_obstacle(request, chunk_size):
        raise ValueError(f"pallas_delta_rule cannot compute this, because {obstacle}")
    # Not at the top of the file: importing Pallas takes 0.1 s, and most programs ask only for the obstacle.
    from ._delta_rule_calls import apply_kernels

    if log_decay is None:
        log_decay = jnp.zeros(query.shape[:3], jnp.float32)
    if state is None:
        state = jnp.zeros((len(key), *key.shape[2:], value.shape[3]), jnp.float32)
    if scale is None:
        scale = query.shape[3] ** -0.5
    if steps > 1:
        query = _spread(query, steps, steps - 1)
        log_decay = _spread(log_decay, steps, 0)
        if segment_ids is not None:
            segment_ids = jnp.repeat(segment_ids, steps, axis=1)

    size = min(chunk_size, max(_SMALLEST_CHUNK, 1 << (rows - 1).bit_length()))
    beta, log_decay = (split_into_chunks(x.astype(jnp.float32), size) for x in (beta, log_decay))
    count = jnp.broadcast_to(count_segment_starts(segment_ids, rows, size)[:, :, None], beta.shape)
    gates = jnp.stack(align_varying(beta, log_decay, count.astype(jnp.float32)), axis=3).swapaxes(1, 2)
    by_head = lambda x: jnp.pad(x.astype(dtype).swapaxes(1, 2), [(0, 0), (0, 0), (0, -rows % size), (0, 0)])
    operands = align_varying(by_head(query), by_head(key), by_head(value), gates, state.astype(jnp.float32))
    output, last = apply_kernels(scale, *refuse_forward_mode(operands, *REFUSED))
    return output[:, :, steps - 1 : rows : steps].swapaxes(1, 2).astype(out_dtype), last


def _spread(x: Float[Array, "batch seq *dims"], steps: int, step: int) -> Float[Array, "batch rows *dims"]:
    """Give every token `steps` rows: its own at `step`, zeros elsewhere."""
    widths = [(0, 0), (0, 0), (step, steps - 1 - step), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x[:, :, None], widths).reshape(len(x), -1, *x.shape[2:])
