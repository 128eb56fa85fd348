"""The mLSTM of xLSTM: linear attention with an exponential input gate and a normalizer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.shapes import MatrixState, Queries, SegmentIds, Values

from .affine import IncomingState
from .chunks import batched_matmul, find_segment_starts, sum_log_decays
from .gated_linear import GATED_LINEAR
from .select import RecurrenceRequest
from .stabilizer import StabilizedMap, StabilizedState, stabilize

_EPSILON = 1e-6
_MAX_EXPONENT = 80.0
"""Upper bound of exponents: outputs divided by exp(80) are zero for all purposes, and inf has no gradient."""


class MatrixMemory(NamedTuple):
    """The state of an mLSTM: memory and normalizer, both times exp(-maximum)."""

    sums: Float[Array, "batch heads key_dim value_dim+1"]
    """The memory, sums of gated k vᵀ, and in the last column the normalizer, sums of gated k."""
    maximum: Float[Array, "batch heads"]

    @property
    def memory(self) -> MatrixState:
        """The memory without its normalizer."""
        return self.sums[..., :-1]


class _MatrixMemoryMap(StabilizedMap):
    """The map that a range of tokens applies to a `MatrixMemory`."""

    initial_maximum = 0.0


def mlstm(
    query: Queries,
    key: Queries,
    value: Values,
    input_gate: Float[Array, "batch seq heads"],
    forget_gate: Float[Array, "batch seq heads"],
    *,
    state: MatrixMemory | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixMemory]:
    """Compute the mLSTM (Beck et al., arXiv:2405.04517, equations 19 to 27):

        m_t = max(logsigmoid(f_t) + m_{t-1}, i_t)
        F_t = exp(logsigmoid(f_t) + m_{t-1} - m_t),  I_t = exp(i_t - m_t)
        C_t = F_t C_{t-1} + I_t k_t v_tᵀ,  n_t = F_t n_{t-1} + I_t k_t
        o_t = C_tᵀ q_t / (max(|n_t · q_t|, exp(-m_t)) + 1e-6),  with q key_dim ** -0.5 times the query

    C, n and m start at zero, in every segment. Given m (`stabilizer`), C and n are one state of `gated_linear`, with n
    the column for a value of 1; see there for costs and rounding. The output is the same as with the unstabilized sums
    C exp(m) and n exp(m), up to the 1e-6.

    For an `IncomingState`, the products of queries with it are added to the products over the shard's own tokens: 2
    key_dim value_dim FLOPs more per token and head.
    """
    forget = jax.nn.log_sigmoid(forget_gate.astype(jnp.float32))
    gate = input_gate.astype(jnp.float32)
    log_input = gate
    if segment_ids is not None:
        # m starts at 0, which decays once before the first token.
        log_input = jnp.where(find_segment_starts(segment_ids)[..., None], jnp.maximum(gate, forget), gate)
    incoming, initial_sums, initial_maximum = None, None, None  # without an initial m, m is only over these tokens
    if callable(state):
        incoming = state
    elif state is None:
        initial_maximum = jnp.zeros_like(gate[:, 0])
    else:
        initial_sums, initial_maximum = state
    log_decay, _, maximum = stabilize(forget, log_input, state=initial_maximum, segment_ids=segment_ids)
    scale = query.shape[-1] ** -0.5
    ones = jnp.ones_like(value[..., :1], jnp.float32)
    inputs = jnp.concatenate([value.astype(jnp.float32), ones], axis=-1) * jnp.exp(gate - maximum)[..., None]
    chosen = GATED_LINEAR.select(implementation, RecurrenceRequest.from_heads(query, inputs, log_decay))
    if chosen.name != "recurrent":
        inputs = inputs.astype(value.dtype)
    sums, last = chosen.function(
        query,
        key,
        inputs,
        log_decay,
        scale=scale,
        state=initial_sums,
        segment_ids=segment_ids,
    )
    sums = sums.astype(jnp.float32)
    last = StabilizedState(maximum[:, -1], last)
    if incoming is not None:
        log_factor = sum_log_decays(forget, segment_ids)
        shard = _MatrixMemoryMap(log_factor[:, -1], *last)
        before = incoming(shard)
        read = scale * batched_matmul(query.swapaxes(1, 2), before.sums.astype(query.dtype)).swapaxes(1, 2)
        maximum, sums = StabilizedMap(log_factor, maximum, sums).apply(StabilizedState(before.maximum[:, None], read))
        last = shard.apply(before)
    lower_bound = jnp.exp(jnp.minimum(-maximum, _MAX_EXPONENT))[..., None]
    divisor = jnp.maximum(jnp.abs(sums[..., -1:]), lower_bound) + _EPSILON
    return (sums[..., :-1] / divisor).astype(value.dtype), MatrixMemory(last.sums, last.maximum)
