"""The mLSTM's matrix memory: linear attention with an exponential input gate and a normalizer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .chunks import RecurrenceMode, find_segment_starts
from .gated_linear import select_gated_linear
from .stabilizer import stabilize

_EPSILON = 1e-6
_MAX_EXPONENT = 80.0
"""What exponents are bounded to: outputs divided by more than exp(80) are zeros to all intents; inf has no gradient."""


class MatrixMemory(NamedTuple):
    """What an mLSTM remembers, both sums divided by exp(maximum)."""

    sums: Float[Array, "batch heads key_dim value_dim+1"]
    """Of gated k vᵀ, and in the last column of gated k: the memory, and its normalizer."""
    maximum: Float[Array, "batch heads"]

    @property
    def memory(self) -> Float[Array, "batch heads key_dim value_dim"]:
        return self.sums[..., :-1]


def mlstm(
    query: Float[Array, "batch seq heads key_dim"],
    key: Float[Array, "batch seq heads key_dim"],
    value: Float[Array, "batch seq heads value_dim"],
    input_gate: Float[Array, "batch seq heads"],
    forget_gate: Float[Array, "batch seq heads"],
    *,
    state: MatrixMemory | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    mode: RecurrenceMode = "chunked",
) -> tuple[Float[Array, "batch seq heads value_dim"], MatrixMemory]:
    """The memory of xLSTM (Beck et al., arXiv:2405.04517, equations 19 to 27):

        m_t = max(logsigmoid(f_t) + m_{t-1}, i_t)
        F_t = exp(logsigmoid(f_t) + m_{t-1} - m_t),  I_t = exp(i_t - m_t)
        C_t = F_t C_{t-1} + I_t k_t v_tᵀ,  n_t = F_t n_{t-1} + I_t k_t
        o_t = C_tᵀ q_t / (max(|n_t · q_t|, exp(-m_t)) + 1e-6),  with q key_dim ** -0.5 times the query

    C, n and m start at zero, in every segment. Once m is known (`zoo.ops.stabilizer`), C and n are one state of
    `zoo.ops.gated`, n being the column that belongs to a value of 1: costs and rounding are its. The output is that of
    the unbounded sums C exp(m) and n exp(m), but for what 1e-6 adds.
    """
    forget, gate = jax.nn.log_sigmoid(forget_gate.astype(jnp.float32)), input_gate.astype(jnp.float32)
    first = jnp.zeros(gate.shape[:2], bool) if segment_ids is None else find_segment_starts(segment_ids)
    first = first.at[:, 0].set(True) if state is None else first
    # A maximum starts at 0, which has decayed once when the first token comes.
    entered = jnp.where(first[..., None], jnp.maximum(gate, forget), gate)
    before = None if state is None else state.maximum
    log_decay, _, maximum = stabilize(forget, entered, state=before, segment_ids=segment_ids)
    ones = jnp.ones_like(value[..., :1], jnp.float32)
    inputs = jnp.concatenate([value.astype(jnp.float32), ones], axis=-1) * jnp.exp(gate - maximum)[..., None]
    sums, after = select_gated_linear(mode)(
        query,
        key,
        inputs if mode == "recurrent" else inputs.astype(value.dtype),
        log_decay,
        scale=query.shape[-1] ** -0.5,
        state=None if state is None else state.sums,
        segment_ids=segment_ids,
    )
    sums = sums.astype(jnp.float32)
    least = jnp.exp(jnp.minimum(-maximum, _MAX_EXPONENT))[..., None]
    divisor = jnp.maximum(jnp.abs(sums[..., -1:]), least) + _EPSILON
    return (sums[..., :-1] / divisor).astype(value.dtype), MatrixMemory(after, maximum[:, -1])
