"""The running maximum that stabilizes exponential gates in float32.

    m_t = max(g_t + m_{t-1}, i_t)

A recurrence S_t = exp(g_t) S_{t-1} + exp(i_t) x_t with log inputs i of any size is stored as exp(-m_t) S_t, with log
decay g_t + m_{t-1} - m_t and log input i_t - m_t, both at most 0 (Beck et al., xLSTM, arXiv:2405.04517, section 2.3,
per head; Peng et al., RWKV, arXiv:2305.13048, appendix D, per channel).

It is a first-order recurrence over the max-plus semiring, and runs in the two levels of `diagonal_scan`. The gradient
follows the larger branch: the cotangent of m_t goes to i_t where m_t = i_t, else to g_t and m_{t-1}, by one backward
scan with factors of 0 and 1. In ms, forward and forward with gradient, float32, on two cores of an EPYC (jax 0.10):

    [batch, seq, numbers]         [8, 256, 4]    [8, 256, 512]    [1, 8192, 512]
    this                          0.1    0.2     3.1     7        15     74
    lax.scan, token by token      0.1    0.2     3.3     9        30    104
    lax.associative_scan          0.1    0.3     3.2    51        33    235

FLOPs per token and feature: 6; bytes: 28. Rounding: 6e-8 |m_t|. It cancels in values computed from all three results,
and a log decay that should be 0 may exceed it by as much.

A range of tokens takes the stored state (m, s) before it, that is exp(m) s, to `StabilizedMap`

    M = max(G + m, m'),    exp(G + m - M) s + exp(m' - M) s'

with G the sum of its log decays and (m', s') its own state, so that shards of a sequence compose by the max-plus rule.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from zoo.ops.custom_vjps import refuse_forward_mode, run_in_rule
from zoo.ops.recurrence.chunks import find_segment_starts
from zoo.ops.recurrence.diagonal_scan import (
    REAL_SEMIRING,
    Semiring,
    expand_mask_dims,
    flatten_features,
    semiring_scan,
)
from zoo.ops.varying import align_varying
from zoo.shapes import SegmentIds

NO_HISTORY = -1e30
"""The maximum of an empty state. Finite, so that sums with it are not NaN."""

_MAX_PLUS_SEMIRING = Semiring(jnp.add, jnp.maximum, 0.0, NO_HISTORY)
_CHUNK_SIZE = 64


def stabilize(
    log_decay: Float[Array, "batch seq *features"],
    log_input: Float[Array, "batch seq *features"],
    *,
    state: Float[Array, "batch *features"] | None = None,
    segment_ids: SegmentIds | None = None,
    stop_gradient: bool = False,
) -> tuple[
    Float[Array, "batch seq *features"], Float[Array, "batch seq *features"], Float[Array, "batch seq *features"]
]:
    """Compute the stabilized log decay g_t + m_{t-1} - m_t, the log input i_t - m_t and m_t, all float32.

    `state` is the last m of earlier tokens; None, or `NO_HISTORY` elementwise, means that there are none. A token
    without history, and the first of a segment, has m_t = i_t and a log decay of 0, because the state before it is zero
    or of another segment. Log inputs are clipped to `NO_HISTORY` from below, including -inf.

    Gradients flow through m. `stop_gradient` makes m a constant, which saves a scan: exact if the results are only used
    for values that do not depend on m, such as exp(m_t) S_t or the quotient of two such S_t.
    """
    log_decay, log_input, state, segment_ids = align_varying(log_decay, log_input, state, segment_ids)
    log_decay = log_decay.astype(jnp.float32)
    log_input = jnp.maximum(log_input.astype(jnp.float32), NO_HISTORY)
    if state is None:
        state = jnp.full_like(log_input[:, 0], NO_HISTORY)
    else:
        state = state.astype(jnp.float32)
    masked_decay = log_decay
    if segment_ids is not None:
        is_start = expand_mask_dims(find_segment_starts(segment_ids), masked_decay)
        masked_decay = jnp.where(is_start, NO_HISTORY, masked_decay)
    operands = (masked_decay, log_input, state)
    if stop_gradient:
        operands = lax.stop_gradient(operands)
        state = operands[2]
    operands = refuse_forward_mode(operands, "the running maximum of exponential gates")
    maximum = _running_maximum(
        flatten_features(operands[0], 2), flatten_features(operands[1], 2), flatten_features(operands[2], 1)
    ).reshape(log_input.shape)
    previous = jnp.concatenate([state[:, None], maximum[:, :-1]], axis=1)
    is_first = (previous <= NO_HISTORY / 2) | (masked_decay <= NO_HISTORY / 2)
    # The difference of the maxima comes first: it is exact for neighboring floats, which cancels the rounding of m.
    difference = jnp.where(is_first, 0, previous) - jnp.where(is_first, 0, maximum)
    return jnp.where(is_first, 0, log_decay + difference), log_input - maximum, maximum


class StabilizedState(NamedTuple):
    """The state exp(maximum) * sums, with a sum or several for each maximum."""

    maximum: Float[Array, "batch *features"]
    sums: Any
    """Arrays with the dims of `maximum` in front."""


class StabilizedMap(NamedTuple):
    """The affine map of a range of tokens with exponential gates; exact for log factors and maxima of any size."""

    log_factor: Float[Array, "batch *features"]
    """Sum of the log decays; -inf where a segment starts after the first token."""
    maximum: Float[Array, "batch *features"]
    sums: Any

    initial_maximum = NO_HISTORY  # the maximum of an empty state

    @property
    def offset(self) -> StabilizedState:
        """The state after the range from an empty state."""
        maximum = jnp.full_like(self.maximum, self.initial_maximum)
        return self.apply(StabilizedState(maximum, jax.tree.map(jnp.zeros_like, self.sums)))

    def apply(self, state: StabilizedState) -> StabilizedState:
        """Return the state after the range."""
        maximum = jnp.maximum(self.log_factor + state.maximum, self.maximum)
        decay = _rescale(self.log_factor, state.maximum, maximum)
        weight = _rescale(0, self.maximum, maximum)
        combine = lambda x, own: expand_mask_dims(decay, x) * x + expand_mask_dims(weight, own) * own
        return StabilizedState(maximum, jax.tree.map(combine, state.sums, self.sums))

    def then(self, later: "StabilizedMap") -> "StabilizedMap":
        """Return the map of this range followed by a later one."""
        state = later.apply(StabilizedState(self.maximum, self.sums))
        return type(self)(self.log_factor + later.log_factor, *state)

    def reset(self, fresh: Bool[Array, "batch"]) -> "StabilizedMap":
        """Return the map that takes any state to `offset` in rows where `fresh`."""
        constant = type(self)(jnp.full_like(self.log_factor, -jnp.inf), *self.offset)
        return jax.tree.map(lambda new, old: jnp.where(expand_mask_dims(fresh, old), new, old), constant, self)


def _rescale(log_factor: Array | int, old: Array, new: Array) -> Array:
    """Compute exp(log_factor + old - new), the factor from one maximum to another; 0 without history."""
    is_empty = old <= NO_HISTORY / 2
    # The difference of the maxima comes first, as in `stabilize`.
    return jnp.where(is_empty, 0, jnp.exp(log_factor + jnp.where(is_empty, 0, old - new)))


@jax.custom_vjp
def _running_maximum(log_decay: Array, log_input: Array, state: Array) -> Float[Array, "batch seq channels"]:
    """Compute m_t = max(g_t + m_{t-1}, i_t) of operands that vary over the same mesh axes."""
    return semiring_scan(_MAX_PLUS_SEMIRING, log_decay, log_input, state, chunk_size=_CHUNK_SIZE)[0]


def _running_maximum_fwd(log_decay: Array, log_input: Array, state: Array) -> tuple[Array, tuple[Array, Array]]:
    """Return the maxima, and as a residual where the decayed one is larger."""
    maximum = run_in_rule(_running_maximum, log_decay, log_input, state)
    return maximum, (maximum > log_input, state)


def _running_maximum_bwd(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array, Array]:
    """Return the cotangents, along the larger branch."""
    is_decayed, state = residuals
    factor = is_decayed.astype(jnp.float32)
    next_factor = jnp.concatenate([factor[:, 1:], jnp.ones_like(factor[:, :1])], axis=1)
    total, _ = semiring_scan(
        REAL_SEMIRING, next_factor, gradient, jnp.zeros_like(state), chunk_size=_CHUNK_SIZE, reverse=True
    )
    grad_decay = factor * total
    return grad_decay, total - grad_decay, grad_decay[:, 0]


_running_maximum.defvjp(_running_maximum_fwd, _running_maximum_bwd)
