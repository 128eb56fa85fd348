"""The mLSTM as a layer: a matrix memory with exponential gates. The recurrence is `zoo.ops.mlstm`."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.chunks import RecurrenceMode
from zoo.ops.recurrence.mlstm import MatrixMemory, mlstm
from zoo.ops.recurrence.stabilizer import NO_HISTORY
from zoo.parallel import Dim, Module, full_precision, implementation_option
from zoo.shapes import HiddenStates

from ..abstract import AbstractLinear, AbstractMixer
from ..linear import Linear, resolve_head_dim
from ..token_info import TokenInfo
from .common import HeadNorm, OutputGate, QKVProjections
from .context import RecurrenceContext


class _MLSTMState(Module):
    """What an mLSTM remembers, in float32: see `zoo.ops.mlstm.MatrixMemory`."""

    sums: Float[Array, "batch heads key_dim value_dim"]
    """One column wider than values are."""
    maximum: Float[Array, "batch heads"]


class MLSTM(AbstractMixer):
    """y = W_out [sigmoid(W_gate x) * norm(h_t)], h_t being the read-out of `zoo.ops.mlstm` with gates
    i = cap(w_i x + b_i) and f = cap(w_f x + b_f) a head, cap(z) = 15 tanh(z / 15) (xLSTM, Beck et al.,
    arXiv:2405.04517, section 2.3, in the simpler block of xLSTM 7B, arXiv:2503.13427, section 3). Heads are split over
    `tensor`."""

    projections: QKVProjections
    input_gate: AbstractLinear = full_precision()
    forget_gate: AbstractLinear = full_precision()
    readout: OutputGate

    gate_cap: float = eqx.field(static=True)
    mode: RecurrenceMode = implementation_option()

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        gate_cap: float | int = 15.0,
        out_scale: float = 1.0,
        mode: RecurrenceMode = "chunked",
        key: Key[Array, ""],
    ):
        """- `value_dim` is `embed / heads` unless given, `key_dim` half of it.
        - `gate_cap`: what bounds the gates before their exponential and sigmoid.

        Input gates start nearly shut (a bias of -10), forget gates nearly open (3 to 6), as in xLSTM 7B.
        """
        value_dim = resolve_head_dim(embed, heads, value_dim, "value_dim")
        key_dim = max(value_dim // 2, 1) if key_dim is None else key_dim
        input_key, i_key, f_key, out_key = jax.random.split(key, 4)
        self.projections = QKVProjections(embed, heads, key_dim, value_dim, key=input_key)
        gates = [Linear(embed, heads, in_=Dim("embed"), out=Dim("heads"), bias=True, key=own) for own in (i_key, f_key)]
        biases = jnp.full(heads, -10.0), jnp.linspace(3.0, 6.0, heads)
        self.input_gate, self.forget_gate = (
            eqx.tree_at(lambda gate: gate.bias, gate, bias) for gate, bias in zip(gates, biases, strict=True)
        )
        self.readout = OutputGate(
            embed,
            heads,
            value_dim,
            norm=lambda: HeadNorm(heads, value_dim, centered=True),
            norm_over_heads=True,
            gate=True,
            activation=jax.nn.sigmoid,
            out_scale=out_scale,
            key=out_key,
        )
        self.gate_cap, self.mode = float(gate_cap), mode

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> _MLSTMState:
        memory = self.projections.init_state(batch, self.projections.value_dim + 1)
        return _MLSTMState(memory.matrix, jnp.zeros(memory.matrix.shape[:2], jnp.float32))

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: _MLSTMState | None = None
    ) -> tuple[HiddenStates, _MLSTMState | None]:
        course = RecurrenceContext.from_info(x, info, state, self.mode)
        query, key, value, _ = self.projections(x, course, None)
        wide = x.astype(jnp.float32)
        input_gate, forget_gate = (
            self.gate_cap * jnp.tanh(gate(wide) / self.gate_cap) for gate in (self.input_gate, self.forget_gate)
        )
        mixed, after = mlstm(
            query,
            key,
            value,
            course.mask_padding(input_gate, NO_HISTORY),
            course.mask_padding(forget_gate, -NO_HISTORY),
            state=None if state is None else MatrixMemory(state.sums, state.maximum),
            segment_ids=course.segment_ids,
            mode=course.mode,
        )
        return self.readout(mixed, x), None if state is None else _MLSTMState(after.sums, after.maximum)
