"""RWKV-4's attention: a mean of values with weights that decay, a number a channel.

    o_t = (n_{t-1} + exp(u + k_t) v_t) / (d_{t-1} + exp(u + k_t))
    n_t = exp(-exp(w)) n_{t-1} + exp(k_t) v_t
    d_t = exp(-exp(w)) d_{t-1} + exp(k_t)

(Peng et al., arXiv:2305.13048, section 3.1.3 and appendix D.) The present token enters with the bonus u, before it
decays for the first time. Keys are exponents of any size, so n and d are kept times exp(-m_t), m being the running
maximum of `zoo.ops.stabilizer`. What is made of them does not depend on m, and gradients take it for a constant.

`recurrent` is the appendix, in `lax.scan`. `chunked` makes m, then n and d by two elementwise recurrences, then all
outputs at once. FLOPs: 40 a token and channel, of them five exponentials; bytes: 100 (`recurrent` 12). Rounding:
differences of keys and maxima are taken first, which of neighbors is exact, and only then are decay and bonus added;
so large keys cost little more than small ones.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from zoo.ops.recurrence import diagonal_scan
from zoo.ops.recurrence.chunks import RecurrenceMode, find_segment_starts
from zoo.ops.recurrence.diagonal_scan import align_varying
from zoo.ops.recurrence.stabilizer import NO_HISTORY, stabilize


class WKVState(NamedTuple):
    """What earlier tokens left, in float32: n = exp(maximum) numerator, d = exp(maximum) denominator."""

    numerator: Float[Array, "batch channels"]
    denominator: Float[Array, "batch channels"]
    maximum: Float[Array, "batch channels"]
    """`NO_HISTORY` where there were no tokens."""


def rwkv4(
    k: Float[Array, "batch seq channels"],
    v: Float[Array, "batch seq channels"],
    w: Float[Array, "channels"],
    u: Float[Array, "channels"],
    *,
    state: WKVState | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    token_mask: Bool[Array, "batch seq"] | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[Float[Array, "batch seq channels"], WKVState]:
    """The weighted means, in the dtype of `v`, and what the tokens leave. A channel decays by exp(-exp(w)) a token.

    `state` None says that there were no earlier tokens. What they left counts for nothing from where a token's segment
    is not that of the one before. A token that is not `real` is padding: it leaves the state as it was, and its output
    means nothing. Gradients are those of n / d: of numerator and denominator with the maximum constant.
    """
    k, v, w, u, state, segment_ids, token_mask = align_varying(k, v, w, u, state, segment_ids, token_mask)
    if state is None:
        nothing = jnp.zeros_like(k[:, 0] * w, jnp.float32)
        state = WKVState(nothing, nothing, nothing + NO_HISTORY)
    state = WKVState(*(x.astype(jnp.float32) for x in state))
    wide_k, wide_v, decay, bonus = (x.astype(jnp.float32) for x in (k, v, w, u))
    log_decay = jnp.broadcast_to(-jnp.exp(decay), k.shape)
    if token_mask is not None:
        wide_k = jnp.where(token_mask[..., None], wide_k, NO_HISTORY)
        log_decay = jnp.where(token_mask[..., None], log_decay, 0)
    run = _recurrent_rwkv4 if mode == "recurrent" else _chunked_rwkv4
    output, state = run(wide_k, wide_v, log_decay, bonus, state, segment_ids)
    return output.astype(v.dtype), state


def _recurrent_rwkv4(
    k: Float[Array, "batch seq channels"],
    v: Float[Array, "batch seq channels"],
    log_decay: Float[Array, "batch seq channels"],
    bonus: Float[Array, "channels"],
    state: WKVState,
    segment_ids: Int[Array, "batch seq"] | None,
) -> tuple[Float[Array, "batch seq channels"], WKVState]:
    """The definition, of float32 arrays: one token after another."""
    started = None if segment_ids is None else find_segment_starts(segment_ids).T[..., None]
    fresh = WKVState(*(jnp.full_like(x, fill) for x, fill in zip(state, (0, 0, NO_HISTORY), strict=True)))

    def step(state: WKVState, now: tuple[Array, Array, Array, Array | None]) -> tuple[WKVState, Array]:
        k, v, log_decay, started = now
        if started is not None:
            state = WKVState(*(jnp.where(started, new, old) for new, old in zip(fresh, state, strict=True)))
        maximum = lax.stop_gradient(jnp.maximum(log_decay + state.maximum, k))
        before = jnp.exp(log_decay + (lax.stop_gradient(state.maximum) - maximum))
        entering = _exp_key(k, maximum)
        output = _weighted_average(k, v, bonus, state)
        numerator = before * state.numerator + entering * v
        return WKVState(numerator, before * state.denominator + entering, maximum), output

    in_time = lambda x: jnp.moveaxis(x, 1, 0)
    last, output = lax.scan(step, state, (in_time(k), in_time(v), in_time(log_decay), started))
    return jnp.moveaxis(output, 0, 1), last


def _chunked_rwkv4(
    k: Float[Array, "batch seq channels"],
    v: Float[Array, "batch seq channels"],
    log_decay: Float[Array, "batch seq channels"],
    bonus: Float[Array, "channels"],
    state: WKVState,
    segment_ids: Int[Array, "batch seq"] | None,
) -> tuple[Float[Array, "batch seq channels"], WKVState]:
    """The same, of whole stretches: the maxima, numerators and denominators of all tokens, then all outputs."""
    decay, _, maximum = stabilize(log_decay, k, state=state.maximum, segment_ids=segment_ids, stop_gradient=True)
    entering = _exp_key(k, maximum)
    run = lambda x, first: diagonal_scan.chunked_diagonal(decay, x, state=first, segment_ids=segment_ids)[0]
    every = WKVState(run(entering * v, state.numerator), run(entering, state.denominator), maximum)
    before = [jnp.concatenate([first[:, None], x[:, :-1]], axis=1) for first, x in zip(state, every, strict=True)]
    if segment_ids is not None:
        started = find_segment_starts(segment_ids)[..., None]
        before = [jnp.where(started, fill, x) for x, fill in zip(before, (0, 0, NO_HISTORY), strict=True)]
    return _weighted_average(k, v, bonus, WKVState(*before)), WKVState(*(x[:, -1] for x in every))


def _exp_key(k: Array, maximum: Array) -> Array:
    """exp(k - maximum), and nothing for padding, though there be no history whose maximum were above it."""
    return jnp.where(k > NO_HISTORY, jnp.exp(k - maximum), 0)


def _weighted_average(k: Array, v: Array, bonus: Array, state: WKVState) -> Array:
    """The output of a token with key `k` and value `v`, after those that left `before`."""
    highest = lax.stop_gradient(jnp.maximum(state.maximum, bonus + k))
    old, new = jnp.exp(lax.stop_gradient(state.maximum) - highest), jnp.exp(bonus + (k - highest))
    return (old * state.numerator + new * v) / (old * state.denominator + new)
