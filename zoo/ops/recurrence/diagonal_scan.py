"""The elementwise recurrence, a number of state a channel, in forms that must agree.

    h_t = exp(g_t) h_{t-1} + x_t,    g_t <= 0

It is what HGRN and RG-LRU are, and RWKV-4 after its stabilizer (Martin & Cundy, arXiv:1709.04057, section 2.2, for the
recurrence and its gradient). `recurrent` is that line in `lax.scan`: the definition, and the step of decoding.
`chunked` is for training, and has a gradient of its own: it keeps the factors and the output, nothing else; with y_t
the cotangent of h_t,

    dx_t = y_t + exp(g_{t+1}) dx_{t+1},    dg_t = exp(g_t) h_{t-1} dx_t

the same recurrence run backward. Each pass has two levels. First every chunk, all at once, runs from zero and keeps
its last value and the product of its factors; one scan carries these from chunk to chunk; then every chunk runs again
from its true start. That is chunk + chunks + chunk steps one after another in place of seq. Steps read their token
where it lies: `lax.scan` would first copy time to the front. In ms, forward and forward with gradient, float32, on two
cores of an EPYC (jax 0.10):

    [batch, seq, channels]                 [8, 256, 512]    [1, 8192, 512]
    lax.scan, token by token               1.0     3.8       19      37
    the two levels, chunk 64               1.0     3.5        7      30
    lax.associative_scan                   1.4     -         32       -
    chunks of associative_scan             4.2     -         29       -

and chunks of 16 to 128 within a fifth of these. Nothing is divided by a product of decays, and every factor is at most
one: decays of any strength give zeros, not NaN. Rounding is that of the sum itself, 6e-8 of the largest term for each
token that is still remembered.

FLOPs: 2 a token and channel (`chunked` 5, and twice that for the gradient). Bytes: 12 (`chunked` 20).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zoo.ops.recurrence.chunks import find_segment_starts
from zoo.ops.varying import vary, varying

_UNROLL = 4
"""How many tokens a step of the loops takes."""


def recurrent_diagonal(
    log_decay: Float[Array, "batch seq *features"],
    x: Float[Array, "batch seq *features"],
    *,
    state: Float[Array, "batch *features"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq *features"], Float[Array, "batch *features"]]:
    """h_t = exp(g_t) h_{t-1} + x_t, one token after another: every h in the dtype of `x`, and the last in float32.

    `state` is what earlier tokens left, None zero. Where a token's segment is not that of the one before, h_{t-1}
    counts for nothing; the first token goes on from `state`.
    """
    factor, wide, state = _prepare_diagonal_operands(log_decay, x, state, segment_ids)

    def step(h: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        factor, x = now
        h = factor * h + x
        return h, h

    last, every = lax.scan(step, state, (jnp.moveaxis(factor, 1, 0), jnp.moveaxis(wide, 1, 0)))
    return jnp.moveaxis(every, 0, 1).astype(x.dtype), last


def chunked_diagonal(
    log_decay: Float[Array, "batch seq *features"],
    x: Float[Array, "batch seq *features"],
    *,
    state: Float[Array, "batch *features"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    chunk_size: int = 64,
) -> tuple[Float[Array, "batch seq *features"], Float[Array, "batch *features"]]:
    """The same in two levels, all chunks at once. It has no forward-mode differentiation, which JAX says with a
    `TypeError`.

    **Raises** `ValueError` for a chunk below 1.
    """
    factor, wide, state = _prepare_diagonal_operands(log_decay, x, state, segment_ids)
    every, last = _linear_scan(
        flatten_features(factor, 2), flatten_features(wide, 2), flatten_features(state, 1), chunk_size=chunk_size
    )
    return every.reshape(x.shape).astype(x.dtype), last.reshape(state.shape)


def affine_diagonal(
    log_decay: Float[Array, "batch seq *features"],
    x: Float[Array, "batch seq *features"],
    *,
    segment_ids: Int[Array, "batch seq"] | None = None,
    chunk_size: int = 64,
) -> tuple[Float[Array, "batch *features"], Float[Array, "batch *features"]]:
    """What a stretch of tokens does to the state that it finds: (A, B), with h_out = A h_in + B, both float32.

    A = exp(sum of g), or 0 where a segment began after the first token; B is what the stretch leaves of its own.
    """
    _, own = chunked_diagonal(log_decay, x, segment_ids=segment_ids, chunk_size=chunk_size)
    decay = jnp.exp(log_decay.astype(jnp.float32).sum(1))
    if segment_ids is not None:
        decay = jnp.where(expand_mask_dims(find_segment_starts(segment_ids).any(1), decay), 0, decay)
    return decay, own


def _prepare_diagonal_operands(
    log_decay: Array, x: Array, state: Array | None, segment_ids: Array | None
) -> tuple[Array, Array, Array]:
    """Factors, inputs and the first state in float32, varying alike; a factor is zero where a segment starts."""
    log_decay, x, state, segment_ids = align_varying(log_decay, x, state, segment_ids)
    state = jnp.zeros_like(x[:, 0], jnp.float32) if state is None else state.astype(jnp.float32)
    factor = jnp.exp(log_decay.astype(jnp.float32))
    if segment_ids is not None:
        factor = jnp.where(expand_mask_dims(find_segment_starts(segment_ids), factor), 0, factor)
    return factor, x.astype(jnp.float32), state


def align_varying(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, or trees of them, cast to vary over the mesh as any of them does; None stays None."""
    return vary(arrays, frozenset().union(*(varying(x) for x in jax.tree.leaves(arrays))))


def expand_mask_dims(mask: Array, x: Array) -> Array:
    """A mask of the first dims of `x` with as many dims as `x`."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))


def flatten_features(x: Array, lead: int) -> Array:
    """Features as one dim, behind `lead` others."""
    return x.reshape(*x.shape[:lead], -1)


class Semiring(NamedTuple):
    """What stands for times and plus in h_t = a_t h_{t-1} + x_t, and the neutral elements of both."""

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
    """h_t = a_t h_{t-1} + x_t by factors themselves, float32: every h and the last. The operands vary alike."""
    return _linear_scan_custom_vjp(chunk_size, factor, x, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_scan_custom_vjp(chunk_size: int, factor: Array, x: Array, state: Array) -> tuple[Array, Array]:
    """`linear`, with the gradient that the module describes."""
    return semiring_scan(REAL_SEMIRING, factor, x, state, chunk_size=chunk_size)


def _linear_scan_fwd(chunk_size: int, factor: Array, x: Array, state: Array) -> tuple[tuple[Array, Array], tuple]:
    """The result, and what its gradient needs."""
    every, last = _linear_scan_custom_vjp(chunk_size, factor, x, state)
    return (every, last), (factor, every, state)


def _linear_scan_bwd(chunk_size: int, residuals: tuple, gradient: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """The recurrence run backward, the last state's cotangent being what it starts from."""
    factor, every, state = residuals
    of_every, of_last = gradient
    following = jnp.concatenate([factor[:, 1:], jnp.ones_like(factor[:, :1])], axis=1)
    of_x, _ = semiring_scan(REAL_SEMIRING, following, of_every, of_last, chunk_size=chunk_size, reverse=True)
    previous = jnp.concatenate([state[:, None], every[:, :-1]], axis=1)
    return previous * of_x, of_x, factor[:, 0] * of_x[:, 0]


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
    """h_t = a_t h_{t-1} + x_t over a semiring, from the last token to the first if `reverse`: every h, and the last
    that was computed. The two levels of the module's docstring; without a gradient.

    **Raises** `ValueError` for a chunk below 1.
    """
    if chunk_size < 1:
        raise ValueError(f"elementwise: chunk is {chunk_size}; a chunk has at least one token.")
    seq = x.shape[1]
    chunks = -(-seq // chunk_size)
    size = -(-seq // chunks)
    factor, x = _pad_into_chunks(factor, size, semiring.one), _pad_into_chunks(x, size, semiring.zero)

    def at(i: Array) -> tuple[Array, tuple[Array, Array]]:
        i = size - 1 - i if reverse else i
        return i, tuple(lax.dynamic_index_in_dim(x, i, 2, keepdims=False) for x in (factor, x))

    def summarize(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        through, own = carry
        _, (factor, x) = at(i)
        return semiring.times(through, factor), semiring.plus(semiring.times(factor, own), x)

    def pass_on(h: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        through, own = chunk
        return semiring.plus(semiring.times(through, h), own), h

    def write(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        h, every = carry
        i, (factor, x) = at(i)
        h = semiring.plus(semiring.times(factor, h), x)
        return h, lax.dynamic_update_index_in_dim(every, h, i, 2)

    loop = functools.partial(lax.fori_loop, 0, size, unroll=min(_UNROLL, size))
    if chunks > 1:
        neutral = (jnp.full_like(x[:, :, 0], semiring.one), jnp.full_like(x[:, :, 0], semiring.zero))
        summary = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), loop(summarize, neutral))
        last, borders = lax.scan(pass_on, state, summary, reverse=reverse)
        _, every = loop(write, (jnp.moveaxis(borders, 0, 1), jnp.zeros_like(x)))
    else:
        ended, every = loop(write, (state[:, None], jnp.zeros_like(x)))
        last = ended[:, 0]
    return every.reshape(len(x), -1, x.shape[-1])[:, :seq], last


def _pad_into_chunks(
    x: Float[Array, "batch seq channels"], size: int, fill: float
) -> Float[Array, "batch chunks size channels"]:
    """Time in chunks of `size`, the last filled up."""
    padding = [(0, 0), (0, -x.shape[1] % size), (0, 0)]
    return jnp.pad(x, padding, constant_values=fill).reshape(len(x), -1, size, x.shape[-1])
