"""mLSTM: matrix memory with exponential gating. The recurrence is `zoo.ops.recurrence.mlstm`."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.gated_linear import GATED_LINEAR
from zoo.ops.recurrence.mlstm import MatrixMemory, mlstm
from zoo.ops.recurrence.stabilizer import NO_HISTORY
from zoo.parallel import Dim, Module, full_precision, implementation_option
from zoo.shapes import HiddenStates, MatrixState, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer
from ..linear import Linear, resolve_head_dim
from ..token_info import TokenInfo
from .common import HeadNorm, OutputGate, QKVProjections
from .context import RecurrenceContext


class _MLSTMState(Module):
    """Recurrent state of an mLSTM, in float32: see `zoo.ops.recurrence.mlstm.MatrixMemory`."""

    sums: MatrixState
    """Matrix memory, with the normalizer as an additional column."""
    maximum: Float[Array, "batch heads"]


class MLSTM(AbstractMixer):
    """y = W_out [sigmoid(W_gate x) * norm(h_t)], where h_t is the output of `zoo.ops.recurrence.mlstm` with one input
    gate i = cap(w_i x + b_i) and one forget gate f = cap(w_f x + b_f) per head, cap(z) = 15 tanh(z / 15) (xLSTM, Beck
    et al., arXiv:2405.04517, section 2.3, in the simpler block of xLSTM 7B, arXiv:2503.13427, section 3). Heads are
    sharded over `tensor`."""

    shards_sequence = True

    projections: QKVProjections
    input_gate: AbstractLinear = full_precision()
    forget_gate: AbstractLinear = full_precision()
    readout: OutputGate

    gate_cap: float = eqx.field(static=True)
    implementation: str = implementation_option(GATED_LINEAR)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        gate_cap: float | int = 15.0,
        epsilon: float = 1e-6,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `value_dim`: `embed / heads` by default. `key_dim`: half of value_dim by default.
        - `gate_cap`: soft cap of the gate pre-activations.
        - `epsilon`: of the norm of each head's output.

        Biases of input gates are initialized to -10 (nearly closed), biases of forget gates to 3, ..., 6 (nearly open),
        as in xLSTM 7B.
        """
        value_dim = resolve_head_dim(embed, heads, value_dim, "value_dim")
        if key_dim is None:
            key_dim = max(value_dim // 2, 1)
        input_key, i_key, f_key, out_key = jax.random.split(key, 4)
        self.projections = QKVProjections(embed, heads, key_dim, value_dim, key=input_key)
        gates = [
            Linear(embed, heads, in_=Dim("embed"), out=Dim("heads"), bias=True, key=gate_key)
            for gate_key in (i_key, f_key)
        ]
        biases = jnp.full(heads, -10.0, jnp.float32), jnp.linspace(3.0, 6.0, heads, dtype=jnp.float32)
        self.input_gate, self.forget_gate = (
            eqx.tree_at(lambda gate: gate.bias, gate, bias) for gate, bias in zip(gates, biases, strict=True)
        )
        self.readout = OutputGate(
            embed,
            heads,
            value_dim,
            norm=lambda: HeadNorm(heads, value_dim, epsilon=epsilon, centered=True),
            norm_over_heads=True,
            gate=True,
            activation=jax.nn.sigmoid,
            out_scale=out_scale,
            key=out_key,
        )
        self.gate_cap = float(gate_cap)
        self.implementation = implementation

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> _MLSTMState:
        matrix = self.projections.init_state(batch, self.projections.value_dim + 1).matrix
        return _MLSTMState(matrix, jnp.zeros(matrix.shape[:2], jnp.float32))

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: _MLSTMState | None = None
    ) -> tuple[ResidualStream, _MLSTMState | None]:
        context = RecurrenceContext.from_info(x, info, state, self.implementation)
        query, key, value, _ = self.projections(x, context, None)
        x32 = x.astype(jnp.float32)
        input_gate, forget_gate = (
            self.gate_cap * jnp.tanh(gate(x32) / self.gate_cap) for gate in (self.input_gate, self.forget_gate)
        )
        memory = None if state is None else MatrixMemory(state.sums, state.maximum)
        mixed, memory = mlstm(
            query,
            key,
            value,
            context.mask_padding(input_gate, NO_HISTORY),
            context.mask_padding(forget_gate, -NO_HISTORY),
            state=context.initial_state(memory),
            segment_ids=context.segment_ids,
            implementation=context.implementation,
        )
        y = self.readout(mixed, x)
        if state is None:
            return y, None
        return y, _MLSTMState(memory.sums, memory.maximum)
