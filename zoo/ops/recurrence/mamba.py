"""Mamba's selective scan (S6): a diagonal state-space model with `state` numbers per channel.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,    o_t = C_t . h_t + D x_t

with dt and x per channel, A negative and per channel and state, B and C shared by all channels (Gu & Dao,
arXiv:2312.00752, algorithm 2; the input is discretized by dt B, as in the paper's code, not by the exact integral of
its equation 4). `recurrent_selective_scan` is these lines in `lax.scan`: the reference, and the decode step.
`chunked_selective_scan` is for training and never materializes the states of all tokens, 4 seq inner state bytes per
row. The forward pass saves the states at chunk boundaries, one in `CHUNK_SIZE` = 8; the backward pass goes from the
last chunk to the first, rematerializes the states of a chunk and then, with y_t the cotangent of o_t, runs

    l_t = exp(dt_{t+1} A) l_{t+1} + C_t y_t        the cotangent of h_t
    dC_t = sum over channels of h_t y_t,           dB_t = sum over channels of l_t dt_t x_t
    du_t = sum over state of l_t B_t,              dx_t = dt_t du_t
    q_t = l_t exp(dt_t A) h_{t-1},                 ddt_t = sum over state of q_t A + x_t du_t,    dA = sum of dt_t q_t

`inner` is the last dim, for vector units. Sums over the state or over channels are matrix products, in the gradient
over a chunk at once: elementwise sums, or products per step, took up to several times as long on a CPU, especially for
a single row, where `lax.scan` over tokens was slower than these loops, too. `scripts/bench.py --parts recurrences`
measures the time, which is linear in seq.

There are seq sequential steps for any chunk size: running all chunks in parallel, as in `diagonal_scan`, would compute
every exponential twice. Every factor is at most one, whatever dt A. Rounding is the error of float32 sums over the
tokens that have not decayed and over state or channels.

Where the sequence is sharded, a shard scans from zero and then adds C_t . exp(A (dt_1 + ... + dt_t)) h_0, with h_0 the
state that earlier shards leave: 4 state FLOPs more, with one exponential each, and no sequential steps. The gradient
rematerializes them.

FLOPs per token and channel: 7 state, one exponential each; with the gradient 27 state, three exponentials each. Bytes:
12, and state / 2 for boundary states.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from zoo.ops.custom_vjps import refuse_forward_mode
from zoo.ops.recurrence.affine import DiagonalAffineMap, IncomingState
from zoo.ops.recurrence.chunks import find_segment_starts, is_in_first_segment
from zoo.ops.recurrence.select import RecurrenceRequest, make_recurrence
from zoo.ops.varying import align_varying
from zoo.shapes import SegmentIds

CHUNK_SIZE = 8
"""Number of tokens whose states the backward pass holds at a time."""


def selective_scan(
    x: Float[Array, "batch seq inner"],
    dt: Float[Array, "batch seq inner"],
    A: Float[Array, "inner state"],
    B: Float[Array, "batch seq state"],
    C: Float[Array, "batch seq state"],
    D: Float[Array, "inner"],
    *,
    state: Float[Array, "batch inner state"] | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "batch seq inner"], Float[Array, "batch inner state"]]:
    """Compute the selective scan: o_t = C_t . h_t + D x_t in the dtype of `x`, and the last h in float32.

    All sums are float32. `dt` is after its softplus, and `A` is negative. `state` is the initial state, zero by
    default; every segment but the first resets it.
    """
    run = SELECTIVE_SCAN.select(implementation, RecurrenceRequest.from_channels(x)).function
    if not callable(state):
        return run(x, dt, A, B, C, D, state=state, segment_ids=segment_ids)
    output, offset = run(x.astype(jnp.float32), dt, A, B, C, D, segment_ids=segment_ids)
    inputs, A, _, _ = _prepare_scan_inputs(x, dt, A, B, C, D, None, segment_ids)
    time = inputs.dt.cumsum(1)
    C = inputs.C
    decay = jnp.exp(time[:, -1, :, None] * A)
    if segment_ids is not None:
        is_reached = is_in_first_segment(segment_ids)[..., None]
        C = jnp.where(is_reached, C, 0)
        decay = jnp.where(is_reached[:, -1:], decay, 0)
    affine_map = DiagonalAffineMap(decay, offset)
    initial = state(affine_map)
    return (output + _read_initial_state(time, A, C, initial)).astype(x.dtype), affine_map.apply(initial)


def recurrent_selective_scan(
    x: Float[Array, "batch seq inner"],
    dt: Float[Array, "batch seq inner"],
    A: Float[Array, "inner state"],
    B: Float[Array, "batch seq state"],
    C: Float[Array, "batch seq state"],
    D: Float[Array, "inner"],
    *,
    state: Float[Array, "batch inner state"] | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Float[Array, "batch seq inner"], Float[Array, "batch inner state"]]:
    """Scan over tokens: the reference. Its gradient saves the states of all tokens."""
    inputs, A_fp32, D_fp32, h = _prepare_scan_inputs(x, dt, A, B, C, D, state, segment_ids)

    def step(h: Array, token: _ScanInputs) -> tuple[Array, Array]:
        if token.keep is not None:
            h = token.keep[:, None, None] * h
        h = jnp.exp(token.dt[..., None] * A_fp32) * h + (token.dt * token.x)[..., None] * token.B[:, None]
        return h, (h * token.C[:, None]).sum(-1) + D_fp32 * token.x

    h, output = lax.scan(step, h, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs))
    return jnp.moveaxis(output, 0, 1).astype(x.dtype), h


def chunked_selective_scan(
    x: Float[Array, "batch seq inner"],
    dt: Float[Array, "batch seq inner"],
    A: Float[Array, "inner state"],
    B: Float[Array, "batch seq state"],
    C: Float[Array, "batch seq state"],
    D: Float[Array, "inner"],
    *,
    state: Float[Array, "batch inner state"] | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Array, "batch seq inner"], Float[Array, "batch inner state"]]:
    """Compute `recurrent_selective_scan` with a custom VJP that saves boundary states and rematerializes the others.

    Forward-mode differentiation raises `TypeError`.

    **Raises** `ValueError` for a `chunk_size` below 1.
    """
    if chunk_size < 1:
        raise ValueError(f"mamba: chunk_size is {chunk_size}; a chunk has at least one token.")
    inputs, A_fp32, D_fp32, h = _prepare_scan_inputs(x, dt, A, B, C, D, state, segment_ids)
    seq = x.shape[1]
    chunk_size = min(chunk_size, x.shape[1])
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, -seq % chunk_size), *[(0, 0)] * (x.ndim - 2)]), inputs)
    if padded.keep is not None:
        padded = padded._replace(keep=jnp.where(jnp.arange(padded.keep.shape[1]) < seq, padded.keep, 1))
    padded, A_fp32, h = refuse_forward_mode((padded, A_fp32, h), "the chunked selective scan")
    output, h = _checkpointed_scan(chunk_size, padded, A_fp32.T, h.mT)
    return (output[:, :seq] + D_fp32 * inputs.x).astype(x.dtype), h.mT


class _ScanInputs(NamedTuple):
    """Inputs of all tokens, or of one, in float32; `keep` is 0 where a segment starts and 1 elsewhere."""

    x: Array
    dt: Array
    B: Array
    C: Array
    keep: Array | None


def _prepare_scan_inputs(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array, state: Array | None, segment_ids: Array | None
) -> tuple[_ScanInputs, Array, Array, Array]:
    """Return inputs, A, D and the initial state in float32, varying over the same mesh axes."""
    x, dt, A, B, C, D, state, segment_ids = align_varying(x, dt, A, B, C, D, state, segment_ids)
    if segment_ids is None:
        keep = None
    else:
        keep = (~find_segment_starts(segment_ids)).astype(jnp.float32)
    x, dt, A, B, C, D = (x.astype(jnp.float32) for x in (x, dt, A, B, C, D))
    if state is None:
        h = jnp.zeros_like(x[:, 0, :, None] * A)
    else:
        h = state.astype(jnp.float32)
    return _ScanInputs(x, dt, B, C, keep), A, D, h


def _read_initial_state(
    time: Float[Array, "batch seq inner"],
    A: Float[Array, "inner state"],
    C: Float[Array, "batch seq state"],
    state: Float[Array, "batch inner state"],
) -> Float[Array, "batch seq inner"]:
    """Compute C_t . exp(time_t A) h for the initial state h, chunk by chunk. The gradient rematerializes a chunk's
    decays."""
    seq = time.shape[1]
    size = min(CHUNK_SIZE, seq)

    def split(x: Array) -> Float[Array, "chunks batch size _"]:
        padded = jnp.pad(x, [(0, 0), (0, -seq % size), (0, 0)])
        return jnp.moveaxis(padded.reshape(x.shape[0], -1, size, x.shape[-1]), 1, 0)

    @jax.checkpoint
    def read_chunk(chunk: tuple[Array, Array]) -> Float[Array, "batch size inner"]:
        time, C = chunk
        return _sum_over_state("btsi,bts->bti", jnp.exp(time[:, :, None] * A.T) * state.mT[:, None], C)

    output = jnp.moveaxis(lax.map(read_chunk, (split(time), split(C))), 0, 1)
    return output.reshape(time.shape[0], -1, time.shape[-1])[:, :seq]


def _decay_state(A: Array, dt: Array, keep: Array | None, h: Array) -> Array:
    """Compute exp(dt A) h, or zero where a segment starts, [batch, state, inner]."""
    h = jnp.exp(dt[:, None] * A) * h
    if keep is None:
        return h
    return keep[:, None, None] * h


def _index_token(x: Any, i: Array) -> Any:
    """Index the i-th token of arrays [batch, seq, ...]."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 1, keepdims=False), x)


def _slice_chunk(x: Any, k: Array, chunk_size: int) -> Any:
    """Slice the k-th chunk of arrays [batch, seq, ...]."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, k * chunk_size, chunk_size, 1), x)


def _set_token(tokens: Array, x: Array, i: Array | int) -> Array:
    """Set the i-th token of an array [batch, seq, ...] to `x`."""
    return lax.dynamic_update_index_in_dim(tokens, x, i, 1)


def _sum_over_state(spec: str, h: Array, weights: Array) -> Array:
    """Sum over the state by a product: XLA's CPU backend takes ten times as long for an elementwise sum of one row."""
    return jnp.einsum(spec, h, weights, precision="highest")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _checkpointed_scan(chunk_size: int, inputs: _ScanInputs, A: Array, state: Array) -> tuple[Array, Array]:
    """Compute C_t . h_t, and the last h, for a whole number of chunks. In A and h, inner is the last dim."""
    output, last, _ = _scan_with_boundary_states(chunk_size, inputs, A, state)
    return output, last


def _scan_with_boundary_states(
    chunk_size: int, inputs: _ScanInputs, A: Array, state: Array
) -> tuple[Array, Array, Array]:
    """Compute `_checkpointed_scan`, and the initial states of chunks, [chunks, batch, state, inner]."""

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        h, output = carry
        token = _index_token(inputs, i)
        h = _decay_state(A, token.dt, token.keep, h) + (token.dt * token.x)[:, None] * token.B[..., None]
        return h, _set_token(output, _sum_over_state("bsi,bs->bi", h, token.C), i)

    def run_chunk(carry: tuple[Array, Array], k: Array) -> tuple[tuple[Array, Array], Array]:
        return lax.fori_loop(0, chunk_size, lambda i, carry: step(k * chunk_size + i, carry), carry), carry[0]

    chunks = jnp.arange(inputs.x.shape[1] // chunk_size)
    (last, output), boundary_states = lax.scan(run_chunk, (state, jnp.zeros_like(inputs.x)), chunks)
    return output, last, boundary_states


def _checkpointed_scan_fwd(
    chunk_size: int, inputs: _ScanInputs, A: Array, state: Array
) -> tuple[tuple[Array, Array], tuple]:
    """Return the outputs, and inputs, A and boundary states as residuals."""
    output, last, boundary_states = _scan_with_boundary_states(chunk_size, inputs, A, state)
    return (output, last), (inputs, A, boundary_states)


def _checkpointed_scan_bwd(
    chunk_size: int, residuals: tuple, gradient: tuple[Array, Array]
) -> tuple[_ScanInputs, Array, Array]:
    """Return the cotangents, chunk by chunk from the last: rematerialize states, then run the module's equations."""
    inputs, A, boundary_states = residuals
    grad_output, grad_last = gradient
    loop = functools.partial(lax.fori_loop, 0, chunk_size)

    def run_chunk(carry: tuple[Array, Array], xs: tuple[Array, Array]) -> tuple[tuple[Array, Array], _ScanInputs]:
        k, boundary_state = xs
        chunk = _slice_chunk(inputs, k, chunk_size)
        y = _slice_chunk(grad_output, k, chunk_size)
        u = chunk.dt * chunk.x

        def forward_step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            h, states = carry
            token = _index_token(chunk, i)
            h = _decay_state(A, token.dt, token.keep, h) + (token.dt * token.x)[:, None] * token.B[..., None]
            return h, _set_token(states, h, i + 1)

        def backward_step(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            grad_h, grad_A, grad_states, grad_dt = carry
            i = chunk_size - 1 - i
            token = _index_token(chunk, i)
            grad_state = grad_h + token.C[..., None] * _index_token(y, i)[:, None]
            grad_h = _decay_state(A, token.dt, token.keep, grad_state)
            q = grad_h * _index_token(states, i)
            grad_A = grad_A + token.dt[:, None] * q
            return (
                grad_h,
                grad_A,
                _set_token(grad_states, grad_state, i),
                _set_token(grad_dt, _sum_over_state("bsi,s->bi", q * A, jnp.ones_like(A[:, 0])), i),
            )

        batch, *rest = boundary_state.shape
        states = jnp.zeros_like(boundary_state, shape=(batch, chunk_size + 1, *rest))
        _, states = loop(forward_step, (boundary_state, _set_token(states, boundary_state, 0)))
        initial = (*carry, jnp.zeros_like(states[:, 1:]), jnp.zeros_like(y))
        grad_h, grad_A, grad_states, grad_dt = loop(backward_step, initial)
        grad_C = jnp.einsum("btsi,bti->bts", states[:, 1:], y, precision="highest")
        grad_B = jnp.einsum("btsi,bti->bts", grad_states, u, precision="highest")
        grad_u = _sum_over_state("btsi,bts->bti", grad_states, chunk.B)
        return (grad_h, grad_A), _ScanInputs(chunk.dt * grad_u, grad_dt + chunk.x * grad_u, grad_B, grad_C, None)

    chunks = (jnp.arange(len(boundary_states)), boundary_states)
    carry = (grad_last, jnp.zeros_like(grad_last))
    (grad_first, grad_A), grad_inputs = lax.scan(run_chunk, carry, chunks, reverse=True)
    grad_inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, x.shape[-1]), grad_inputs)
    keep = None if inputs.keep is None else jnp.zeros_like(inputs.keep)
    return grad_inputs._replace(keep=keep), grad_A.sum(0), grad_first


_checkpointed_scan.defvjp(_checkpointed_scan_fwd, _checkpointed_scan_bwd)


SELECTIVE_SCAN = make_recurrence("selective scan", recurrent_selective_scan, chunked_selective_scan)
"""Implementations of the selective scan, in the order in which `"auto"` tries them."""
