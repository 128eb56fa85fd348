"""MesaNet: linear attention with a least squares solution per token. The recurrence is
`zoo.ops.recurrence.mesa_net`."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.mesa_net import MESA_NET, mesa_net
from zoo.parallel import Dim, full_precision, implementation_option
from zoo.shapes import HeadVectors, HiddenStates

from ..abstract import AbstractLinear
from ..linear import Linear
from .base import AbstractRecurrence
from .common import OutputGate, QKVProjections, RecurrentState, head_norm_factory, inverse_softplus, l2_normalize
from .context import RecurrenceContext
from .delta_net import resolve_head_dims


class MesaNet(AbstractRecurrence):
    """y = W_out norm(S_tᵀ x_t) with (R_t + diag(lambda)) x_t = q_t, R_t = exp(g_t) R_{t-1} + beta_t k_t k_tᵀ and
    S_t = exp(g_t) S_{t-1} + beta_t k_t v_tᵀ (von Oswald et al., arXiv:2506.05233). q and k are L2-normalized
    silu(conv(W x)), v = W x, and per head g = logsigmoid(W x + b) and beta = sigmoid(W x + b); lambda, per key channel,
    is a parameter of at least 0.25 by default. The output gate silu(W_gate x) is optional. Heads are sharded over
    `tensor`."""

    projections: QKVProjections
    decay: AbstractLinear
    rate: AbstractLinear
    regularization: Float[Array, "channels"] = full_precision()
    """lambda = 0.25, or another `least_regularization`, + softplus of it, 1 at initialization."""
    readout: OutputGate

    channels: Dim = eqx.field(static=True)
    least_regularization: float = eqx.field(static=True)
    """It bounds the condition number of the systems, and with it the steps of conjugate gradients."""
    steps: int = eqx.field(static=True)
    decode_steps: int = eqx.field(static=True)
    implementation: str = implementation_option(MESA_NET)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_width: int = 4,
        gate: bool = False,
        steps: int = 30,
        decode_steps: int | None = None,
        least_regularization: float = 0.25,
        epsilon: float = 1e-6,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `key_dim`: `embed / heads` by default. `value_dim`: `key_dim` by default.
        - `gate`: multiply the normalized heads by silu(W_gate x).
        - `steps`: the largest number of conjugate gradient steps. `decode_steps`: for calls with a single token, the
          same by default; with fewer, a decoded token differs from the same token in a longer call.
        - `least_regularization`: lower bound of lambda, below 1.
        - `epsilon`: of the norm of each head's output.
        """
        key_dim, value_dim = resolve_head_dims(embed, heads, key_dim, value_dim)
        input_key, decay_key, rate_key, out_key = jax.random.split(key, 4)
        self.projections = QKVProjections(
            embed,
            heads,
            key_dim,
            value_dim,
            conv_width=conv_width,
            activation=jax.nn.silu,
            plain_values=True,
            key=input_key,
        )
        project = partial(Linear, embed, heads, in_=Dim("embed"), out=Dim("heads"), bias=True)
        self.decay = project(key=decay_key)
        self.rate = project(key=rate_key)
        above_least = jnp.full(heads * key_dim, 1 - least_regularization, jnp.float32)
        self.regularization = inverse_softplus(above_least)
        norm = head_norm_factory(value_dim, epsilon)
        self.readout = OutputGate(embed, heads, value_dim, norm=norm, gate=gate, out_scale=out_scale, key=out_key)
        self.channels = Dim("heads", key_dim)
        self.least_regularization = least_regularization
        self.steps = steps
        self.decode_steps = steps if decode_steps is None else decode_steps
        self.implementation = implementation

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> RecurrentState:
        return self.projections.init_state(batch, self.projections.key_dim + self.projections.value_dim, dtype)

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        conv_states = None if context.state is None else context.state.conv_states
        query, key, value, conv_states = self.projections(x, context, conv_states)
        regularization = self.least_regularization + jax.nn.softplus(self.regularization)
        log_decay = jax.nn.log_sigmoid(self.decay(x).astype(jnp.float32))
        mixed, matrix = mesa_net(
            l2_normalize(query),
            context.mask_padding(l2_normalize(key)),
            value,
            context.mask_padding(log_decay),
            jax.nn.sigmoid(self.rate(x).astype(jnp.float32)),
            regularization.reshape(-1, self.projections.key_dim),
            steps=self.decode_steps if x.shape[1] == 1 else self.steps,
            **context.options(),
        )
        return mixed, RecurrentState(matrix, conv_states)
