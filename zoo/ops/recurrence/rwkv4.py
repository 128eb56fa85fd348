"""RWKV-4's time mixing (WKV): an average of values with decaying weights, per channel.

    o_t = (n_{t-1} + exp(u + k_t) v_t) / (d_{t-1} + exp(u + k_t))
    n_t = exp(-exp(w)) n_{t-1} + exp(k_t) v_t
    d_t = exp(-exp(w)) d_{t-1} + exp(k_t)

(Peng et al., arXiv:2305.13048, section 3.1.3 and appendix D.) The current token gets the bonus u instead of a decay.
Keys are exponents of any size, so n and d are stored times exp(-m_t), with m the running maximum of `stabilizer`. The
outputs do not depend on m, which is constant for gradients.

"recurrent" is the appendix, in `lax.scan`. "chunked" computes m, then n and d by two diagonal scans, then all
outputs in parallel. FLOPs per token and channel: 40, with five exponentials; bytes: 100 ("recurrent" 12). Rounding:
differences of keys and maxima come first, exact for neighboring floats, and only then the decay or bonus is added, so
large keys cost little precision.

Where the sequence is sharded, "chunked" scans from an empty state, and then adds the part of the earlier shards' state
that each token retains.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from zoo.ops.recurrence import diagonal_scan
from zoo.ops.recurrence.affine import IncomingState
from zoo.ops.recurrence.chunks import find_segment_starts, sum_log_decays
from zoo.ops.recurrence.select import RecurrenceRequest, make_recurrence
from zoo.ops.recurrence.stabilizer import NO_HISTORY, StabilizedMap, StabilizedState, stabilize
from zoo.ops.varying import align_varying
from zoo.shapes import PaddingMask, SegmentIds


class WKVState(NamedTuple):
    """The state of RWKV-4 in float32: n = exp(maximum) numerator, d = exp(maximum) denominator."""

    numerator: Float[Array, "batch channels"]
    denominator: Float[Array, "batch channels"]
    maximum: Float[Array, "batch channels"]
    """`NO_HISTORY` where there are no earlier tokens."""


def rwkv4(
    k: Float[Array, "batch seq channels"],
    v: Float[Array, "batch seq channels"],
    w: Float[Array, "channels"],
    u: Float[Array, "channels"],
    *,
    state: WKVState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    token_mask: PaddingMask | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "batch seq channels"], WKVState]:
    """Compute WKV: the weighted averages, in the dtype of `v`, and the last state. The decay is exp(-exp(w)) per token.

    `state` is the initial state, empty by default; every segment but the first resets it. `token_mask` is False for
    padding, which leaves the state unchanged and has meaningless outputs. Gradients are taken of n / d, with the
    maximum constant.

    **Raises** `ValueError` for an unknown implementation, and for "recurrent" with an `IncomingState`.
    """
    run = WKV.select(implementation, RecurrenceRequest.from_channels(v, state)).function
    options = {}
    if callable(state):
        options["incoming"] = state
        state = None
    k, v, w, u, state, segment_ids, token_mask = align_varying(k, v, w, u, state, segment_ids, token_mask)
    if state is None:
        zeros = jnp.zeros_like(k[:, 0] * w, jnp.float32)
        state = WKVState(zeros, zeros, zeros + NO_HISTORY)
    state = WKVState(*(x.astype(jnp.float32) for x in state))
    k_fp32, v_fp32, decay, bonus = (x.astype(jnp.float32) for x in (k, v, w, u))
    log_decay = jnp.broadcast_to(-jnp.exp(decay), k.shape)
    if token_mask is not None:
        k_fp32 = jnp.where(token_mask[..., None], k_fp32, NO_HISTORY)
        log_decay = jnp.where(token_mask[..., None], log_decay, 0)
    output, last = run(k_fp32, v_fp32, log_decay, bonus, state, segment_ids, **options)
    return output.astype(v.dtype), last


def _recurrent_rwkv4(
    k: Float[Array, "batch seq channels"],
    v: Float[Array, "batch seq channels"],
    log_decay: Float[Array, "batch seq channels"],
    bonus: Float[Array, "channels"],
    state: WKVState,
    segment_ids: SegmentIds | None,
) -> tuple[Float[Array, "batch seq channels"], WKVState]:
    """Scan over tokens in float32: the reference."""
    if segment_ids is None:
        starts = None
    else:
        starts = find_segment_starts(segment_ids).T[..., None]
    empty = WKVState(*(jnp.full_like(x, fill) for x, fill in zip(state, (0, 0, NO_HISTORY), strict=True)))

    def step(state: WKVState, token: tuple[Array, Array, Array, Array | None]) -> tuple[WKVState, Array]:
        k, v, log_decay, is_start = token
        if is_start is not None:
            state = WKVState(*(jnp.where(is_start, new, old) for new, old in zip(empty, state, strict=True)))
        maximum = lax.stop_gradient(jnp.maximum(log_decay + state.maximum, k))
        decay = jnp.exp(log_decay + (lax.stop_gradient(state.maximum) - maximum))
        weight = _exp_key(k, maximum)
        output = _weighted_average(k, v, bonus, state)
        numerator = decay * state.numerator + weight * v
        return WKVState(numerator, decay * state.denominator + weight, maximum), output

    time_first = lambda x: jnp.moveaxis(x, 1, 0)
    last, output = lax.scan(step, state, (time_first(k), time_first(v), time_first(log_decay), starts))
    return jnp.moveaxis(output, 0, 1), last


def _chunked_rwkv4(
    k: Float[Array, "batch seq channels"],
    v: Float[Array, "batch seq channels"],
    log_decay: Float[Array, "batch seq channels"],
    bonus: Float[Array, "channels"],
    state: WKVState,
    segment_ids: SegmentIds | None,
    incoming: IncomingState | None = None,
) -> tuple[Float[Array, "batch seq channels"], WKVState]:
    """Compute the maxima, numerators and denominators of all tokens by scans, then all outputs in parallel."""
    decay, _, maximum = stabilize(log_decay, k, state=state.maximum, segment_ids=segment_ids, stop_gradient=True)
    weight = _exp_key(k, maximum)
    run = lambda x, initial: diagonal_scan.chunked_diagonal(decay, x, state=initial, segment_ids=segment_ids)[0]
    states = WKVState(run(weight * v, state.numerator), run(weight, state.denominator), maximum)
    if incoming is not None:
        log_factor = sum_log_decays(log_decay, segment_ids)
        own = StabilizedMap(log_factor, maximum, (states.numerator, states.denominator))
        state = _hold_maximum(incoming(jax.tree.map(lambda x: x[:, -1], own)))
        state = state._replace(maximum=jnp.where(state.denominator > 0, state.maximum, NO_HISTORY))
        numerator, denominator, maximum = (x[:, None] for x in state)
        states = _hold_maximum(own.apply(StabilizedState(maximum, (numerator, denominator))))
    shift = lambda initial, x: jnp.concatenate([initial[:, None], x[:, :-1]], axis=1)
    previous = [shift(initial, x) for initial, x in zip(state, states, strict=True)]
    if segment_ids is not None:
        starts = find_segment_starts(segment_ids)[..., None]
        previous = [jnp.where(starts, fill, x) for x, fill in zip(previous, (0, 0, NO_HISTORY), strict=True)]
    return _weighted_average(k, v, bonus, WKVState(*previous)), WKVState(*(x[:, -1] for x in states))


def _hold_maximum(state: StabilizedState) -> WKVState:
    """Make the maximum constant for gradients, with the derivatives of exp(maximum) in the sums."""
    maximum = lax.stop_gradient(state.maximum)
    numerator, denominator = (x * jnp.exp(state.maximum - maximum) for x in state.sums)
    return WKVState(numerator, denominator, maximum)


def _exp_key(k: Array, maximum: Array) -> Array:
    """Compute exp(k - maximum), or 0 for padding, even where there is no history with a larger maximum."""
    return jnp.where(k > NO_HISTORY, jnp.exp(k - maximum), 0)


def _weighted_average(k: Array, v: Array, bonus: Array, state: WKVState) -> Array:
    """Compute the output of a token with key `k` and value `v`, given the state before it."""
    highest = lax.stop_gradient(jnp.maximum(state.maximum, bonus + k))
    state_weight = jnp.exp(lax.stop_gradient(state.maximum) - highest)
    weight = jnp.exp(bonus + (k - highest))
    return (state_weight * state.numerator + weight * v) / (state_weight * state.denominator + weight)


WKV = make_recurrence("RWKV-4's time mixing", _recurrent_rwkv4, _chunked_rwkv4)
"""Implementations of `rwkv4`, in the order in which `"auto"` tries them."""
