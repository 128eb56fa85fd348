"""Mamba's selective scan: a state of `state` numbers for each channel, in forms that must agree.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,    o_t = C_t . h_t + D x_t

with dt and x a number a channel, A a number for each of a channel's state and below zero, B and C shared by all
channels (Gu & Dao, arXiv:2312.00752, algorithm 2; the input is discretized by dt B, as the paper's code does, not by
the exact integral of its equation 4). `recurrent` is these lines in `lax.scan`: the definition, and the step of
decoding. `chunked` is for training: states of all tokens, 4 seq inner state bytes a row, are never held. The forward
pass keeps the states at the chunks' borders, one in `CHUNK` = 8; the backward pass goes from the last chunk to the
first, computes a chunk's states again and then, with y_t the cotangent of o_t, runs

    l_t = exp(dt_{t+1} A) l_{t+1} + C_t y_t        the cotangent of h_t
    dC_t = sum over channels of h_t y_t,           dB_t = sum over channels of l_t dt_t x_t
    du_t = sum over state of l_t B_t,              dx_t = dt_t du_t
    q_t = l_t exp(dt_t A) h_{t-1},                 ddt_t = sum over state of q_t A + x_t du_t,    dA = sum of dt_t q_t

Arrays lie with inner last, which vector units run along. Sums over a state or over channels are products, and those of
the gradient are made for a whole chunk: summed by multiply and add, or each in its own step, they took up to several
times as long on a CPU, a single row above all, of which `lax.scan` over tokens was slower than these loops, too.
`scripts/bench.py --parts recurrences` takes the time, which is linear in seq.

Steps follow one another, seq of them, whatever the chunk: all chunks at once, as in `zoo.ops.elementwise`, would take
every exponential twice. Every factor is at most one, whatever dt A. Rounding is that of sums in float32, over the
tokens that are remembered and over state or channels.

FLOPs a token and channel: 7 state, of them one exponential; with the gradient 27 state, of them three. Bytes: 12, and
half as many as a channel has state, for borders.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zoo.ops.recurrence.chunks import RecurrenceMode, find_segment_starts
from zoo.ops.recurrence.diagonal_scan import align_varying, expand_mask_dims

CHUNK_SIZE = 8
"""How many tokens' states the backward pass holds at a time."""


def selective_scan(
    x: Float[Array, "batch seq inner"],
    dt: Float[Array, "batch seq inner"],
    A: Float[Array, "inner state"],
    B: Float[Array, "batch seq state"],
    C: Float[Array, "batch seq state"],
    D: Float[Array, "inner"],
    *,
    state: Float[Array, "batch inner state"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[Float[Array, "batch seq inner"], Float[Array, "batch inner state"]]:
    """o_t = C_t . h_t + D x_t in the dtype of `x`, and the last h in float32. All sums are float32.

    `dt` is what the softplus gave, and `A` is negative. `state` is what earlier tokens left, None zero. Where a token's
    segment is not that of the one before, h_{t-1} counts for nothing; the first token goes on from `state`.
    """
    return (recurrent_selective_scan if mode == "recurrent" else chunked_selective_scan)(
        x, dt, A, B, C, D, state=state, segment_ids=segment_ids
    )


def recurrent_selective_scan(
    x: Float[Array, "batch seq inner"],
    dt: Float[Array, "batch seq inner"],
    A: Float[Array, "inner state"],
    B: Float[Array, "batch seq state"],
    C: Float[Array, "batch seq state"],
    D: Float[Array, "inner"],
    *,
    state: Float[Array, "batch inner state"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq inner"], Float[Array, "batch inner state"]]:
    """The definition, one token after another. Its gradient holds the states of all tokens."""
    inputs, wide_A, wide_D, h = _prepare_scan_inputs(x, dt, A, B, C, D, state, segment_ids)

    def step(h: Array, now: _ScanInputs) -> tuple[Array, Array]:
        if now.keep is not None:
            h = now.keep[:, None, None] * h
        h = jnp.exp(now.dt[..., None] * wide_A) * h + (now.dt * now.x)[..., None] * now.B[:, None]
        return h, (h * now.C[:, None]).sum(-1) + wide_D * now.x

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
    segment_ids: Int[Array, "batch seq"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Array, "batch seq inner"], Float[Array, "batch inner state"]]:
    """The same, with a gradient that holds the states of one chunk and of the borders. It has no forward-mode
    differentiation, which JAX says with a `TypeError`.

    **Raises** `ValueError` for a chunk below 1.
    """
    if chunk_size < 1:
        raise ValueError(f"mamba: chunk is {chunk_size}; a chunk has at least one token.")
    inputs, wide_A, wide_D, h = _prepare_scan_inputs(x, dt, A, B, C, D, state, segment_ids)
    seq, chunk_size = x.shape[1], min(chunk_size, x.shape[1])
    filled = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, -seq % chunk_size), *[(0, 0)] * (x.ndim - 2)]), inputs)
    if filled.keep is not None:
        filled = filled._replace(keep=jnp.where(jnp.arange(filled.keep.shape[1]) < seq, filled.keep, 1))
    output, h = _checkpointed_scan(chunk_size, filled, wide_A.T, h.mT)
    return (output[:, :seq] + wide_D * inputs.x).astype(x.dtype), h.mT


def affine_selective_scan(
    x: Float[Array, "batch seq inner"],
    dt: Float[Array, "batch seq inner"],
    A: Float[Array, "inner state"],
    B: Float[Array, "batch seq state"],
    *,
    segment_ids: Int[Array, "batch seq"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Array, "batch inner state"], Float[Array, "batch inner state"]]:
    """What a stretch of tokens does to the state that it finds: (decay, own), with h_out = decay h_in + own, float32.

    decay = exp(A sum of dt), or 0 where a segment began after the first token; own is what the stretch leaves.
    """
    _, own = chunked_selective_scan(
        x, dt, A, B, jnp.zeros_like(B), jnp.zeros_like(A[:, 0]), segment_ids=segment_ids, chunk_size=chunk_size
    )
    decay = jnp.exp(dt.astype(jnp.float32).sum(1)[..., None] * A.astype(jnp.float32))
    if segment_ids is not None:
        decay = jnp.where(expand_mask_dims(find_segment_starts(segment_ids).any(1), decay), 0, decay)
    return decay, own


class _ScanInputs(NamedTuple):
    """What a token brings, in float32; `keep` is 0 where a segment starts and 1 elsewhere."""

    x: Array
    dt: Array
    B: Array
    C: Array
    keep: Array | None


def _prepare_scan_inputs(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array, state: Array | None, segment_ids: Array | None
) -> tuple[_ScanInputs, Array, Array, Array]:
    """The tokens, A, D and the first state in float32, varying alike."""
    x, dt, A, B, C, D, state, segment_ids = align_varying(x, dt, A, B, C, D, state, segment_ids)
    keep = None if segment_ids is None else (~find_segment_starts(segment_ids)).astype(jnp.float32)
    x, dt, A, B, C, D = (x.astype(jnp.float32) for x in (x, dt, A, B, C, D))
    h = jnp.zeros_like(x[:, 0, :, None] * A) if state is None else state.astype(jnp.float32)
    return _ScanInputs(x, dt, B, C, keep), A, D, h


def _decay_state(A: Array, dt: Array, keep: Array | None, h: Array) -> Array:
    """exp(dt A) h, or zero where a segment starts, [batch, state, inner]."""
    h = jnp.exp(dt[:, None] * A) * h
    return h if keep is None else keep[:, None, None] * h


def _index_token(x: Any, i: Array) -> Any:
    """The i-th token of an array, or of each of a tuple, [batch, seq, ...]."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 1, keepdims=False), x)


def _slice_chunk(x: Any, k: Array, chunk_size: int) -> Any:
    """The k-th chunk of an array, or of each of a tuple, [batch, seq, ...]."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, k * chunk_size, chunk_size, 1), x)


def _set_token(into: Array, x: Array, i: Array | int) -> Array:
    """`x` as the i-th token's."""
    return lax.dynamic_update_index_in_dim(into, x, i, 1)


def _sum_over_state(spec: str, h: Array, weights: Array) -> Array:
    """Sums over a channel's state. As a product: XLA's CPU backend takes ten times as long to sum one row's."""
    return jnp.einsum(spec, h, weights, precision="highest")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _checkpointed_scan(chunk_size: int, inputs: _ScanInputs, A: Array, state: Array) -> tuple[Array, Array]:
    """C_t . h_t of whole chunks, and the last h, with A and h laid out with inner last: vector units run along it."""
    output, last, _ = _scan_with_boundary_states(chunk_size, inputs, A, state)
    return output, last


def _scan_with_boundary_states(
    chunk_size: int, inputs: _ScanInputs, A: Array, state: Array
) -> tuple[Array, Array, Array]:
    """The same, and the states that chunks start from, [chunks, batch, state, inner]."""

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        h, output = carry
        now = _index_token(inputs, i)
        h = _decay_state(A, now.dt, now.keep, h) + (now.dt * now.x)[:, None] * now.B[..., None]
        return h, _set_token(output, _sum_over_state("bsi,bs->bi", h, now.C), i)

    def over(carry: tuple[Array, Array], k: Array) -> tuple[tuple[Array, Array], Array]:
        def within(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            return step(k * chunk_size + i, carry)

        return lax.fori_loop(0, chunk_size, within, carry), carry[0]

    chunks = jnp.arange(inputs.x.shape[1] // chunk_size)
    (last, output), borders = lax.scan(over, (state, jnp.zeros_like(inputs.x)), chunks)
    return output, last, borders


def _checkpointed_scan_fwd(
    chunk_size: int, inputs: _ScanInputs, A: Array, state: Array
) -> tuple[tuple[Array, Array], tuple]:
    """The result, and what its gradient needs."""
    output, last, borders = _scan_with_boundary_states(chunk_size, inputs, A, state)
    return (output, last), (inputs, A, borders)


def _checkpointed_scan_bwd(
    chunk_size: int, residuals: tuple, gradient: tuple[Array, Array]
) -> tuple[_ScanInputs, Array, Array]:
    """Chunks from the last to the first: their states again, then the cotangents, as the module describes them."""
    inputs, A, borders = residuals
    of_output, of_last = gradient
    loop = functools.partial(lax.fori_loop, 0, chunk_size)

    def over(carry: tuple[Array, Array], chunk_of: tuple[Array, Array]) -> tuple[tuple[Array, Array], _ScanInputs]:
        k, border = chunk_of
        here, y = _slice_chunk(inputs, k, chunk_size), _slice_chunk(of_output, k, chunk_size)
        u = here.dt * here.x

        def again(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            h, states = carry
            now = _index_token(here, i)
            h = _decay_state(A, now.dt, now.keep, h) + (now.dt * now.x)[:, None] * now.B[..., None]
            return h, _set_token(states, h, i + 1)

        def back(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            passed, of_A, of_states, of_dt = carry
            i = chunk_size - 1 - i
            now = _index_token(here, i)
            of_h = passed + now.C[..., None] * _index_token(y, i)[:, None]
            passed = _decay_state(A, now.dt, now.keep, of_h)
            q = passed * _index_token(states, i)
            of_A = of_A + now.dt[:, None] * q
            return (
                passed,
                of_A,
                _set_token(of_states, of_h, i),
                _set_token(of_dt, _sum_over_state("bsi,s->bi", q * A, jnp.ones_like(A[:, 0])), i),
            )

        states = jnp.zeros_like(border, shape=(len(border), chunk_size + 1, *border.shape[1:]))
        _, states = loop(again, (border, _set_token(states, border, 0)))
        passed, of_A, of_states, of_dt = loop(back, (*carry, jnp.zeros_like(states[:, 1:]), jnp.zeros_like(y)))
        of_C = jnp.einsum("btsi,bti->bts", states[:, 1:], y, precision="highest")
        of_B = jnp.einsum("btsi,bti->bts", of_states, u, precision="highest")
        of_u = _sum_over_state("btsi,bts->bti", of_states, here.B)
        return (passed, of_A), _ScanInputs(here.dt * of_u, of_dt + here.x * of_u, of_B, of_C, None)

    (of_state, of_A), of_inputs = lax.scan(
        over, (of_last, jnp.zeros_like(of_last)), (jnp.arange(len(borders)), borders), reverse=True
    )
    of_inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, x.shape[-1]), of_inputs)
    keep = None if inputs.keep is None else jnp.zeros_like(inputs.keep)
    return of_inputs._replace(keep=keep), of_A.sum(0), of_state


_checkpointed_scan.defvjp(_checkpointed_scan_fwd, _checkpointed_scan_bwd)
