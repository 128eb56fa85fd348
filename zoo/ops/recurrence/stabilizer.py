"""The running maximum that keeps exponential gates within float32.

    m_t = max(g_t + m_{t-1}, i_t)

Of a recurrence S_t = exp(g_t) S_{t-1} + exp(i_t) x_t whose log inputs i may be of any size, exp(-m_t) S_t is what is
kept: it decays by g_t + m_{t-1} - m_t and takes in with i_t - m_t, and both are at most 0 (Beck et al., xLSTM,
arXiv:2405.04517, section 2.3; Peng et al., RWKV, arXiv:2305.13048, appendix D; one number a head in the first, a
number a channel in the second).

It is a first-order recurrence with max for plus and plus for times, and runs in the two levels of
`zoo.ops.elementwise`. Its gradient follows the branch that won: a cotangent of m_t goes to i_t where m_t = i_t, else to
g_t and on to m_{t-1}; one scan backward with factors of 0 and 1. In ms, forward and
forward with gradient, float32, on two cores of an EPYC (jax 0.10):

    [batch, seq, numbers]         [8, 256, 4]    [8, 256, 512]    [1, 8192, 512]
    this                          0.1    0.2     3.1     7        15     74
    lax.scan, token by token      0.1    0.2     3.3     9        30    104
    lax.associative_scan          0.1    0.3     3.2    51        33    235

FLOPs: 6 a token and number; bytes: 28. Rounding is one of m's own, 6e-8 |m_t|; what is made with the three results
agrees whatever m is, and a log decay that should be 0 may be above it by as much.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zoo.ops.recurrence.chunks import find_segment_starts
from zoo.ops.recurrence.diagonal_scan import (
    REAL_SEMIRING,
    Semiring,
    align_varying,
    expand_mask_dims,
    flatten_features,
    semiring_scan,
)

NO_HISTORY = -1e30
"""The maximum of a state that nothing has been written to. Finite, so that sums with it are no NaN."""

_MAX_PLUS_SEMIRING = Semiring(jnp.add, jnp.maximum, 0.0, NO_HISTORY)
_CHUNK_SIZE = 64


def stabilize(
    log_decay: Float[Array, "batch seq *features"],
    log_input: Float[Array, "batch seq *features"],
    *,
    state: Float[Array, "batch *features"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    stop_gradient: bool = False,
) -> tuple[
    Float[Array, "batch seq *features"], Float[Array, "batch seq *features"], Float[Array, "batch seq *features"]
]:
    """The log decay g_t + m_{t-1} - m_t, the log input i_t - m_t and m_t itself, all float32.

    `state` is the last m of earlier tokens; None, or `NO_HISTORY` in places, says that there were none. A token without
    a history, and the first of a segment, has m_t = i_t and a log decay of 0: the state that it would apply to is zero
    or not its own. Log inputs below `NO_HISTORY`, -inf among them, count as that.

    Gradients are true, and go through m. With `constant` they take m for a number, which saves a scan: right where only
    what does not depend on m is made of the results, as exp(m_t) S_t or the quotient of two such S_t.
    """
    log_decay, log_input, state, segment_ids = align_varying(log_decay, log_input, state, segment_ids)
    log_decay = log_decay.astype(jnp.float32)
    log_input = jnp.maximum(log_input.astype(jnp.float32), NO_HISTORY)
    state = jnp.full_like(log_input[:, 0], NO_HISTORY) if state is None else state.astype(jnp.float32)
    passed = log_decay
    if segment_ids is not None:
        passed = jnp.where(expand_mask_dims(find_segment_starts(segment_ids), passed), NO_HISTORY, passed)
    given = (passed, log_input, state)
    if stop_gradient:
        given = lax.stop_gradient(given)
        state = given[2]
    highest = _running_maximum(
        flatten_features(given[0], 2), flatten_features(given[1], 2), flatten_features(given[2], 1)
    ).reshape(log_input.shape)
    previous = jnp.concatenate([state[:, None], highest[:, :-1]], axis=1)
    alone = (previous <= NO_HISTORY / 2) | (passed <= NO_HISTORY / 2)
    # The difference of two maxima comes first: of neighbors it is exact, and so makes up for the rounding of m itself.
    difference = jnp.where(alone, 0, previous) - jnp.where(alone, 0, highest)
    return jnp.where(alone, 0, log_decay + difference), log_input - highest, highest


@jax.custom_vjp
def _running_maximum(log_decay: Array, log_input: Array, state: Array) -> Float[Array, "batch seq channels"]:
    """m_t = max(g_t + m_{t-1}, i_t) of operands that vary alike."""
    return semiring_scan(_MAX_PLUS_SEMIRING, log_decay, log_input, state, chunk_size=_CHUNK_SIZE)[0]


def _running_maximum_fwd(log_decay: Array, log_input: Array, state: Array) -> tuple[Array, tuple[Array, Array]]:
    """The maxima, and where the decayed one was the higher."""
    highest = _running_maximum(log_decay, log_input, state)
    return highest, (highest > log_input, state)


def _running_maximum_bwd(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array, Array]:
    """Along the branch that won."""
    decayed, state = residuals
    factor = decayed.astype(jnp.float32)
    following = jnp.concatenate([factor[:, 1:], jnp.ones_like(factor[:, :1])], axis=1)
    total, _ = semiring_scan(
        REAL_SEMIRING, following, gradient, jnp.zeros_like(state), chunk_size=_CHUNK_SIZE, reverse=True
    )
    of_decay = factor * total
    return of_decay, total - of_decay, of_decay[:, 0]


_running_maximum.defvjp(_running_maximum_fwd, _running_maximum_bwd)
