"""The diagonal (elementwise) linear recurrence, with one scalar state per channel.

    h_t = exp(g_t) h_{t-1} + x_t,    g_t <= 0

HGRN, RG-LRU and, after stabilization, RWKV-4 are instances (Martin & Cundy, arXiv:1709.04057, section 2.2, for the
recurrence and its gradient). `recurrent_diagonal` is that line in `lax.scan`: the reference, and the decode step.
`chunked_diagonal` is for training. Its custom VJP saves only the factors and the outputs as residuals; with y_t the
cotangent of h_t,

    dx_t = y_t + exp(g_{t+1}) dx_{t+1},    dg_t = exp(g_t) h_{t-1} dx_t

the same recurrence run backward. Each pass has two levels. First all chunks run in parallel from zero, to get the last
value and the product of factors of each; one scan passes states from chunk to chunk; then all chunks run again in
parallel from their initial states. That is chunk_size + chunks + chunk_size sequential steps instead of seq. Steps
index tokens in place: `lax.scan` would first copy time to the front. In ms, forward and forward with gradient, float32,
on two cores of an EPYC (jax 0.10):

    [batch, seq, channels]                 [8, 256, 512]    [1, 8192, 512]
    lax.scan, token by token               1.0     3.8       19      37
    the two levels, chunk 64               1.0     3.5        7      30
    lax.associative_scan                   1.4     -         32       -
    chunks of associative_scan             4.2     -         29       -

Chunks of 16 to 128 are within a fifth of these times. Nothing is divided by a product of decays, and every factor is at
most one: decays of any strength give zeros, not NaN. Rounding is the error of a sum, 6e-8 of the largest term for each
token that has not decayed.

Where the sequence is sharded, a shard scans from zero and then adds exp(g_1 + ... + g_t) h_0, with h_0 the state that
earlier shards leave: one scan, whatever the number of shards, and 3 FLOPs more.

FLOPs: 2 per token and channel (`chunked_diagonal` 5, and twice that for the gradient). Bytes: 12 (`chunked_diagonal`
20).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from zoo.ops.custom_vjps import refuse_forward_mode, run_in_rule
from zoo.ops.recurrence.affine import DiagonalAffineMap, IncomingState
from zoo.ops.recurrence.chunks import find_segment_starts, sum_log_decays
from zoo.ops.recurrence.select import RecurrenceRequest, make_recurrence
from zoo.ops.varying import align_varying
from zoo.shapes import SegmentIds

_UNROLL = 4
"""Number of tokens per loop iteration."""


def diagonal_scan(
    log_decay: Float[Array, "batch seq *features"],
    x: Float[Array, "batch seq *features"],
    *,
    state: Float[Array, "batch *features"] | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "batch seq *features"], Float[Array, "batch *features"]]:
    """Compute `recurrent_diagonal` by an implementation of `DIAGONAL_SCAN`; `state` may belong to a sharded sequence.

    **Raises** `ValueError` for an unknown implementation.
    """
    run = DIAGONAL_SCAN.select(implementation, RecurrenceRequest.from_channels(x)).function
    if not callable(state):
        return run(log_decay, x, state=state, segment_ids=segment_ids)
    outputs, offset = run(log_decay, x.astype(jnp.float32), segment_ids=segment_ids)
    decay = jnp.exp(sum_log_decays(log_decay, segment_ids))
    carried = decay * state(DiagonalAffineMap(decay[:, -1], offset))[:, None]
    return (outputs + carried).astype(x.dtype), offset + carried[:, -1]


def recurrent_diagonal(
    log_decay: Float[Array, "batch seq *features"],
    x: Float[Array, "batch seq *features"],
    *,
    state: Float[Array, "batch *features"] | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Float[Array, "batch seq *features"], Float[Array, "batch *features"]]:
    """Scan h_t = exp(g_t) h_{t-1} + x_t over tokens: returns all h in the dtype of `x`, and the last in float32.

    `state` is the initial state, zero by default. Every segment but the first resets the state.
    """
    factor, x_fp32, state = _prepare_diagonal_operands(log_decay, x, state, segment_ids)

    def step(h: Array, token: tuple[Array, Array]) -> tuple[Array, Array]:
        factor, x = token
        h = factor * h + x
        return h, h

    last, outputs = lax.scan(step, state, (jnp.moveaxis(factor, 1, 0), jnp.moveaxis(x_fp32, 1, 0)))
    return jnp.moveaxis(outputs, 0, 1).astype(x.dtype), last


def chunked_diagonal(
    log_decay: Float[Array, "batch seq *features"],
    x: Float[Array, "batch seq *features"],
    *,
    state: Float[Array, "batch *features"] | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = 64,
) -> tuple[Float[Array, "batch seq *features"], Float[Array, "batch *features"]]:
    """Compute `recurrent_diagonal` in two levels, with all chunks in parallel.

    A custom VJP: forward-mode differentiation raises `TypeError`.

    **Raises** `ValueError` for a `chunk_size` below 1.
    """
    factor, x_fp32, state = _prepare_diagonal_operands(log_decay, x, state, segment_ids)
    outputs, last = _linear_scan(
        flatten_features(factor, 2), flatten_features(x_fp32, 2), flatten_features(state, 1), chunk_size=chunk_size
    )
    return outputs.reshape(x.shape).astype(x.dtype), last.reshape(state.shape)


def _prepare_diagonal_operands(
    log_decay: Array, x: Array, state: Array | None, segment_ids: Array | None
) -> tuple[Array, Array, Array]:
    """Return factors (zero where a segment starts), inputs and initial state in float32, varying over the same axes."""
    log_decay, x, state, segment_ids = align_varying(log_decay, x, state, segment_ids)
    if state is None:
        state = jnp.zeros_like(x[:, 0], jnp.float32)
    else:
        state = state.astype(jnp.float32)
    factor = jnp.exp(log_decay.astype(jnp.float32))
    if segment_ids is not None:
        factor = jnp.where(expand_mask_dims(find_segment_starts(segment_ids), factor), 0, factor)
    return factor, x.astype(jnp.float32), state


def expand_mask_dims(mask: Array, x: Array) -> Array:
    """Append dims of size one to a mask until it has as many dims as `x`."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))


def flatten_features(x: Array, lead: int) -> Array:
    """Flatten all dims after the first `lead` into one."""
    return x.reshape(*x.shape[:lead], -1)


class Semiring(NamedTuple):
    """A semiring for h_t = a_t h_{t-1} + x_t: times, plus, and their neutral elements."""

    times: Any
    plus: Any
    one: float
    zero: float


REAL_SEMIRING = Semiring(jnp.multiply, jnp.add, 1.0, 0.0)


def _linear_scan(
    factor: Float[Array, "batch seq channels"],
    x: Float[Array, "batch seq channels"],
    state: Float[Array, "batch channels"],
    *,
    chunk_size: int = 64,
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch channels"]]:
    """Compute h_t = a_t h_{t-1} + x_t in float32: returns all h and the last. Operands vary over the same mesh axes."""
    factor, x, state = refuse_forward_mode((factor, x, state), "the chunked diagonal scan")
    return _linear_scan_custom_vjp(chunk_size, factor, x, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_scan_custom_vjp(chunk_size: int, factor: Array, x: Array, state: Array) -> tuple[Array, Array]:
    """Compute `_linear_scan`, with the gradient in the module's docstring."""
    return semiring_scan(REAL_SEMIRING, factor, x, state, chunk_size=chunk_size)


def _linear_scan_fwd(chunk_size: int, factor: Array, x: Array, state: Array) -> tuple[tuple[Array, Array], tuple]:
    """Return the outputs, and factors, outputs and initial state as residuals."""
    outputs, last = run_in_rule(_linear_scan_custom_vjp, chunk_size, factor, x, state)
    return (outputs, last), (factor, outputs, state)


def _linear_scan_bwd(chunk_size: int, residuals: tuple, gradient: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Return the cotangents, by the recurrence run backward from the cotangent of the last state."""
    factor, outputs, state = residuals
    grad_outputs, grad_last = gradient
    next_factor = jnp.concatenate([factor[:, 1:], jnp.ones_like(factor[:, :1])], axis=1)
    grad_x, _ = semiring_scan(REAL_SEMIRING, next_factor, grad_outputs, grad_last, chunk_size=chunk_size, reverse=True)
    previous = jnp.concatenate([state[:, None], outputs[:, :-1]], axis=1)
    return previous * grad_x, grad_x, factor[:, 0] * grad_x[:, 0]


_linear_scan_custom_vjp.defvjp(_linear_scan_fwd, _linear_scan_bwd)


def semiring_scan(
    semiring: Semiring,
    factor: Float[Array, "batch seq channels"],
    x: Float[Array, "batch seq channels"],
    state: Float[Array, "batch channels"],
    *,
    chunk_size: int,
    reverse: bool = False,
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch channels"]]:
    """Compute h_t = a_t h_{t-1} + x_t over a semiring, from the last token to the first if `reverse`.

    Returns all h and the last one computed, by the two levels of the module's docstring. Not differentiable.

    **Raises** `ValueError` for a `chunk_size` below 1.
    """
    if chunk_size < 1:
        raise ValueError(f"diagonal_scan: chunk_size is {chunk_size}; a chunk has at least one token.")
    seq = x.shape[1]
    chunks = -(-seq // chunk_size)
    size = -(-seq // chunks)
    factor = _pad_into_chunks(factor, size, semiring.one)
    x = _pad_into_chunks(x, size, semiring.zero)

    def index_tokens(i: Array) -> tuple[Array, tuple[Array, Array]]:
        if reverse:
            i = size - 1 - i
        return i, tuple(lax.dynamic_index_in_dim(x, i, 2, keepdims=False) for x in (factor, x))

    def summarize(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        decay, offset = carry
        _, (factor, x) = index_tokens(i)
        return semiring.times(decay, factor), semiring.plus(semiring.times(factor, offset), x)

    def pass_state(h: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        decay, offset = chunk
        return semiring.plus(semiring.times(decay, h), offset), h

    def write_outputs(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        h, outputs = carry
        i, (factor, x) = index_tokens(i)
        h = semiring.plus(semiring.times(factor, h), x)
        return h, lax.dynamic_update_index_in_dim(outputs, h, i, 2)

    loop = functools.partial(lax.fori_loop, 0, size, unroll=min(_UNROLL, size))
    if chunks > 1:
        identity = (jnp.full_like(x[:, :, 0], semiring.one), jnp.full_like(x[:, :, 0], semiring.zero))
        summary = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), loop(summarize, identity))
        last, boundary_states = lax.scan(pass_state, state, summary, reverse=reverse)
        _, outputs = loop(write_outputs, (jnp.moveaxis(boundary_states, 0, 1), jnp.zeros_like(x)))
    else:
        last, outputs = loop(write_outputs, (state[:, None], jnp.zeros_like(x)))
        last = last[:, 0]
    return outputs.reshape(x.shape[0], -1, x.shape[-1])[:, :seq], last


def _pad_into_chunks(
    x: Float[Array, "batch seq channels"], size: int, fill: float
) -> Float[Array, "batch chunks size channels"]:
    """Split a sequence into chunks of `size` tokens, padding the last with `fill`."""
    padding = [(0, 0), (0, -x.shape[1] % size), (0, 0)]
    return jnp.pad(x, padding, constant_values=fill).reshape(x.shape[0], -1, size, x.shape[-1])


DIAGONAL_SCAN = make_recurrence("diagonal scan", recurrent_diagonal, chunked_diagonal)
"""Implementations of the diagonal scan, in the order in which `"auto"` tries them."""
