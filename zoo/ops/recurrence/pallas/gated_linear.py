"""Gated linear attention as Pallas kernels for TPUs.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ;   o_t = scale q_tᵀ S_t

Opt-in: equal to the other implementations in Pallas' interpreter, and compiled for v5e ahead of time, but not yet
measured on hardware.

It computes `zoo.ops.recurrence.gated_linear.chunked_gated_linear`. For a chunk of C tokens and the state S before it,
with D_ij = exp(g_{j+1} + ... + g_i) for j <= i, f_i = exp(g_1 + ... + g_i) and h_j = exp(g_{j+1} + ... + g_C),

    o  = scale (f Q S + (D * Q Kᵀ) V)
    S' = f_C S + (h K)ᵀ V

(Mamba-2, arXiv:2405.21060, section 6; GLA, arXiv:2312.06635, section 4). With one decay per key channel D is part of
the product over channels, and the scores come from log2(C) products (`_gated_linear_kernels._compute_channel_scores`).
Each exponent is a sum over the tokens in between, never a difference of cumulative sums.

The grid is (batch, head blocks, chunks, heads of a block). A head block holds as many of the heads that share queries
and keys (`groups`) as fit their states into 1 MiB: queries and keys are loaded once for all of them, and the cotangents
of queries and keys are summed over them before they are written. A core runs the chunks of a head block in order, and
the states stay in its memory, in the block of the last states. For the backward pass, the forward pass saves the state
before each chunk, in float32; all else is recomputed from the operands. The backward pass runs from the last chunk to
the first, with the cotangents of the states in place of the states:

    dQ = ((dO Vᵀ) * D) K + f dO Sᵀ           dV = (D * Q Kᵀ)ᵀ dO + h K dS'
    dK = ((dO Vᵀ) * D)ᵀ Q + h V dS'ᵀ         dS = f_C dS' + (f Q)ᵀ dO

and dg_t is the sum of the decays' cotangents times the decays over all ranges that t lies in, without differences.

In bfloat16 all products take bfloat16 operands and accumulate in float32; states, decays and scores are float32 before
they are rounded for a product. Float32 operands are multiplied in float32 (`Precision.HIGHEST`).

FLOPs per token and head, with K = key_dim and V = value_dim: forward 2 C (K + V) + 4 K V, and 2 C^2 in float32 for D;
backward 6 C K + 4 C V + 8 K V, and 4 C^2. With one decay per key channel 2 log2(C) C K instead of 2 C K and 2 C^2, and
2 log2(C) K exponentials; backward three times that. Bytes in HBM per token and head, with operands of w bytes:
forward w (2 K / heads per block + 2 V), and 4 K V / C of states if it is differentiated; backward these, and
w (2 K + V). Operands are first transposed to [batch, heads, seq, dim], another 4 w (K + V).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.shapes import LogDecays, MatrixState, SegmentIds, Values

from ...custom_vjps import refuse_forward_mode
from ...varying import align_varying
from ..chunks import count_segment_starts, split_into_chunks
from ..select import RecurrenceRequest
from ._gated_linear_operands import GatedOperands
from .common import REFUSED, find_platform_obstacle, round_up_to_lanes

_CHUNK_SIZE = 128
"""Tokens per chunk: rows and columns of a TPU's matrix unit."""
_SMALLEST_CHUNK = 16
"""Rows of the smallest tile of bfloat16."""
_LARGEST_CHUNK = 256
_MEMORY = 16 * 2**20
"""Bytes of a core's memory that the compiler gives a kernel."""
_STATE_BYTES = 2**20
"""Most bytes of the states of a head block of several heads: the memory holds four copies of them."""


def find_gated_linear_obstacle(request: RecurrenceRequest, chunk_size: int = _CHUNK_SIZE) -> str | None:
    """Return why `pallas_gated_linear` cannot compute a request, or None."""
    if obstacle := find_platform_obstacle():
        return obstacle
    if request.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it computes in float32 or bfloat16, not {jnp.dtype(request.dtype).name}"
    if request.heads != request.groups and (request.decay == "channel" or request.has_bonus):
        if request.has_bonus:
            vectors = "a bonus per key channel"
        else:
            vectors = "decays per key channel"
        return f"{request.heads} heads of values share {request.groups} heads of keys, with {vectors}"
    if chunk_size & (chunk_size - 1) or not _SMALLEST_CHUNK <= chunk_size <= _LARGEST_CHUNK:
        return f"chunk_size is {chunk_size}, and not a power of two from {_SMALLEST_CHUNK} to {_LARGEST_CHUNK}"
    if (needed := _count_bytes(request, chunk_size)) > _MEMORY:
        return (
            f"a chunk of {chunk_size} tokens with keys of {request.key_dim} and values of {request.value_dim} takes "
            f"{needed / 2**20:.1f} MiB of a core's memory, and a kernel has {_MEMORY / 2**20:.0f}"
        )
    return None


def _count_bytes(request: RecurrenceRequest, size: int) -> int:
    """Bound the memory of a core that the backward kernel takes: two buffers per block, and its temporaries.

    Kernels for v5e bounded by up to 15.9 MiB compiled; kernels bounded by 22 to 27 MiB took 19 to 25.
    """
    key = round_up_to_lanes(request.key_dim)
    value = round_up_to_lanes(request.value_dim)
    width = jnp.dtype(request.dtype).itemsize
    per_channel = request.decay == "channel" or request.has_bonus
    state = 4 * request.key_dim * value
    pairs = 4 * size * round_up_to_lanes(size)
    keys = 4 * size * key
    share = _count_heads_per_block(request)
    blocks = (1 + 2 * share) * state + size * (width * (2 * key + 3 * value) + 8 * key) + 2 * keys * per_channel
    levels = size.bit_length() - 1 if per_channel else 0
    return 2 * blocks + 6 * pairs + 4 * (keys + 4 * size * value) + 3 * state + 6 * levels * keys


def _count_heads_per_block(request: RecurrenceRequest) -> int:
    """Return how many heads that share queries and keys a head block has."""
    group = request.heads // request.groups
    state = 4 * request.key_dim * request.value_dim
    return max(n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n * state <= _STATE_BYTES))


def pallas_gated_linear(
    query: Float[Array, "batch seq groups key_dim"],
    key: Float[Array, "batch seq groups key_dim"],
    value: Values,
    log_decay: LogDecays | None = None,
    *,
    bonus: Float[Array, "heads key_dim"] | None = None,
    scale: float | int = 1.0,
    state: MatrixState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = _CHUNK_SIZE,
) -> tuple[Values, MatrixState]:
    """Compute `recurrent_gated_linear` by kernels: returns the outputs and the state after the last token.

    A sequence shorter than a chunk takes a smaller one. A custom VJP: forward-mode differentiation raises `TypeError`.

    **Raises** `ValueError` if groups do not divide heads, and with the reason of `find_gated_linear_obstacle`.
    """
    batch, seq, groups, key_dim = query.shape
    heads, value_dim = value.shape[2:]
    if heads % groups:
        raise ValueError(
            f"pallas_gated_linear: {heads} heads of values do not divide evenly over {groups} heads of queries and keys"
        )
    request = RecurrenceRequest.from_heads(query, value, log_decay, has_bonus=bonus is not None)
    if obstacle := find_gated_linear_obstacle(request, chunk_size):
        raise ValueError(f"pallas_gated_linear cannot compute this, because {obstacle}")
    # Not at the top of the file: importing Pallas takes 0.1 s, and most programs ask only for the obstacle.
    from ._gated_linear_calls import apply_kernels

    size = min(chunk_size, max(_SMALLEST_CHUNK, 1 << (seq - 1).bit_length()))
    dtype = jnp.result_type(query, key, value)
    out_dtype = value.dtype
    if log_decay is None:
        decays = jnp.zeros(value.shape[:3])
    else:
        decays = log_decay.astype(jnp.float32)
    if bonus is not None and decays.ndim == 3:  # the bonus is in the kernel of vectors
        decays = jnp.broadcast_to(decays[..., None], key.shape)
    if state is None:
        state = jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32)
    by_head = lambda x: jnp.pad(x.swapaxes(1, 2), [(0, 0), (0, 0), (0, -seq % size), (0, 0)])
    query, key, value = (by_head(x.astype(dtype)) for x in (query, key, value))
    if decays.ndim == 4:
        decays = by_head(decays)
    else:
        decays = split_into_chunks(decays, size).swapaxes(1, 2)[:, :, :, None]
    count = count_segment_starts(segment_ids, seq, size)[:, :, None].astype(jnp.float32)
    if bonus is not None:
        bonus = bonus.astype(jnp.float32)[:, None]
    operands = GatedOperands(query, key, value, decays, count, bonus, state.astype(jnp.float32))
    (operands,) = align_varying(refuse_forward_mode(operands, *REFUSED))
    output, last = apply_kernels(float(scale), _count_heads_per_block(request), operands)
    return output[:, :, :seq].swapaxes(1, 2).astype(out_dtype), last
