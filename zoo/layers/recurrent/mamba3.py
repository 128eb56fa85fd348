"""Mamba-3: trapezoidal rule, data-dependent rotations, several inputs and outputs. The recurrence is
`zoo.ops.recurrence.mamba3`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.gated_linear import GATED_LINEAR
from zoo.ops.recurrence.mamba3 import Mamba3State, mamba3
from zoo.parallel import Dim, Module, full_precision, implementation_option, no_weight_decay
from zoo.shapes import HiddenStates, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer
from ..heads import select_kv_heads, split_heads
from ..linear import Linear
from ..norm import RMSNorm
from ..token_info import TokenInfo
from .common import inverse_softplus, sample_log_uniform
from .context import RecurrenceContext
from .gated_norm import GatedGroupNorm

_Rows = Float[Array, "batch seq rank heads _"]


def _compute_decay_rate(x: Float[Array, "batch seq heads"]) -> Float[Array, "batch seq heads"]:
    """Return 1 + x for x >= 0, and 1 / (1 - x) for x < 0: positive, and slower than exp(x) to reach 0."""
    return jnp.maximum(x, 0) + 1 / (1 - jnp.minimum(x, 0))


class _Mamba3State(Module):
    """Recurrent state, in float32: see `zoo.ops.recurrence.mamba3.Mamba3State`. Its size does not depend on the
    sequence length."""

    ssm_state: Float[Array, "batch heads state head_dim"]
    B: Float[Array, "batch rank heads state"]
    x: Float[Array, "batch rank heads head_dim"]
    turns: Float[Array, "batch heads pairs"]


class Mamba3(AbstractMixer):
    """The Mamba-3 block (Lahoti et al., arXiv:2603.15569), parametrized as in the authors' code, state-spaces/mamba:

        B, C = norm(W_B u) + b_B, norm(W_C u) + b_C
        dt = softplus(W_dt u + dt_bias),    λ = sigmoid(W_λ u),    angle = W_angle u
        A = -max(f(W_A u), 1e-4),           f(a) = 1 + a for a >= 0, and 1 / (1 - a) for a < 0
        o = mamba3(W_x u, dt, dt A, λ, angle, B, C, D)
        y = W_out (o * silu(W_gate u))

    u is the input. dt, A, λ and D have one value per head; B and C have `state_dim` values per group of heads, and
    their biases per head; all heads share the angles before they are multiplied by dt. There is no convolution: the
    trapezoidal rule writes two tokens at a time.

    With rank r > 1 (MIMO), B and C have r vectors per token, and a head has r copies of its inputs, gates and outputs,
    each multiplied by a vector of its own:

        x_r = mimo_x_r * W_x u,    y = W_out Σ_r mimo_out_r * o_r * silu(mimo_gate_r * W_gate u)

    The matrix state is as large as for rank 1. dt_bias, D, the biases and the vectors of MIMO keep their dtype under
    `cast`; dt, decays and angles are float32. Heads and groups are sharded over `tensor`, as in `Mamba2`.
    """

    shards_sequence = True

    gate: AbstractLinear
    x: AbstractLinear
    B: AbstractLinear
    C: AbstractLinear
    dt: AbstractLinear
    A: AbstractLinear
    trapezoid: AbstractLinear
    """W_λ."""
    angle: AbstractLinear
    B_norm: RMSNorm
    C_norm: RMSNorm
    dt_bias: Float[Array, "heads"] = full_precision()
    B_bias: Float[Array, "heads rank state"] = no_weight_decay(full_precision=True)
    C_bias: Float[Array, "heads rank state"] = no_weight_decay(full_precision=True)
    D: Float[Array, "heads"] = full_precision()
    mimo_x: Float[Array, "heads rank head_dim"] | None = no_weight_decay(full_precision=True)
    """None for rank 1, as `mimo_gate` and `mimo_out` are."""
    mimo_gate: Float[Array, "heads rank head_dim"] | None = no_weight_decay(full_precision=True)
    mimo_out: Float[Array, "heads rank head_dim"] | None = no_weight_decay(full_precision=True)
    norm: GatedGroupNorm | None
    out: AbstractLinear

    head_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Heads per group."""
    decay_rate: Callable = eqx.field(static=True)
    """f."""
    min_decay_rate: float = eqx.field(static=True)
    implementation: str = implementation_option(GATED_LINEAR)

    def __init__(
        self,
        embed: int,
        heads: int | None = None,
        *,
        head_dim: int = 64,
        groups: int = 1,
        state_dim: int = 128,
        angles: int | None = None,
        rank: int = 1,
        expand: int = 2,
        norm: bool = False,
        epsilon: float | int = 1e-5,
        decay_rate: Callable = _compute_decay_rate,
        min_decay_rate: float = 1e-4,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `heads`: `expand * embed / head_dim` by default, a multiple of `groups`.
        - `state_dim`: SSM state size per channel. `angles`: pairs of states that are turned, `state_dim / 4` by default
          (half of the states), at most `state_dim / 2`.
        - `rank`: inputs and outputs of a head per token.
        - `norm`: if True, y = W_out (norm(o) * silu(W_gate u)), with a norm of each head and output.
        - `epsilon`: of that norm, and of the norms of B and C.
        - `decay_rate`: f. `min_decay_rate`: lower bound of -A.

        Biases of B and C are initialized to 1, D and `mimo_gate` to 1, `mimo_x` and `mimo_out` to 1 / rank, and dt_bias
        such that softplus(dt_bias) is log-uniform in [0.001, 0.1], as in the authors' code.

        **Raises** `ValueError` for a size below 1, for more angles than pairs of states, and if groups does not divide
        heads or head_dim does not divide `expand * embed`.
        """
        if heads is None and (head_dim < 1 or expand * embed % head_dim):
            raise ValueError(f"expand * embed = {expand * embed} does not divide evenly over heads {head_dim} wide")
        if heads is None:
            heads = expand * embed // head_dim
        if angles is None:
            angles = max(state_dim // 4, 1)
        sizes = {"heads": heads, "head_dim": head_dim, "groups": groups, "state_dim": state_dim, "angles": angles}
        sizes["rank"] = rank
        if wrong := [name for name, size in sizes.items() if size < 1]:
            raise ValueError(f"{wrong[0]} is {sizes[wrong[0]]}, and a size is at least 1")
        if heads % groups:
            raise ValueError(f"{heads} heads do not divide evenly over {groups} groups")
        if 2 * angles > state_dim:
            raise ValueError(f"{angles} angles turn pairs of states, and state_dim={state_dim} has {state_dim // 2}")
        keys = jax.random.split(key, 10)
        embed_dim = Dim("embed")
        head_channels = Dim("heads", head_dim)
        group_states = Dim("groups", rank * state_dim)
        project = partial(Linear, embed, in_=embed_dim)
        self.gate = project(heads * head_dim, out=head_channels, key=keys[0])
        self.x = project(heads * head_dim, out=head_channels, key=keys[1])
        self.B, self.C = (project(groups * rank * state_dim, out=group_states, key=key) for key in keys[2:4])
        self.dt, self.A, self.trapezoid = (project(heads, out=Dim("heads"), key=key) for key in keys[4:7])
        self.angle = project(angles, out=Dim("pairs"), key=keys[7])
        self.B_norm, self.C_norm = (RMSNorm(state_dim, features=Dim("state"), epsilon=float(epsilon)) for _ in range(2))
        self.dt_bias = inverse_softplus(sample_log_uniform(keys[8], heads, 1e-3, 1e-1))
        self.B_bias, self.C_bias = (jnp.ones((heads, rank, state_dim), jnp.float32) for _ in range(2))
        self.D = jnp.ones(heads, jnp.float32)
        self.mimo_x = None
        self.mimo_gate = None
        self.mimo_out = None
        if rank > 1:
            ones = jnp.ones((heads, rank, head_dim), jnp.float32)
            self.mimo_x = ones / rank
            self.mimo_gate = ones
            self.mimo_out = ones / rank
        self.norm = None
        if norm:
            self.norm = GatedGroupNorm(heads, head_dim, heads, norm_before_gate=True, epsilon=epsilon)
        self.out = Linear(heads * head_dim, embed, in_=head_channels, out=embed_dim, scale=out_scale, key=keys[9])
        self.head_dim = head_dim
        self.group = heads // groups
        self.decay_rate = decay_rate
        self.min_decay_rate = min_decay_rate
        self.implementation = implementation

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> _Mamba3State:
        heads, rank, state_dim = self.B_bias.shape
        return _Mamba3State(
            jnp.zeros((batch, heads, state_dim, self.head_dim), jnp.float32),
            jnp.zeros((batch, rank, heads, state_dim), jnp.float32),
            jnp.zeros((batch, rank, heads, self.head_dim), jnp.float32),
            jnp.zeros((batch, heads, self.angle.out_size), jnp.float32),
        )

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: _Mamba3State | None = None
    ) -> tuple[ResidualStream, _Mamba3State | None]:
        """With a `state`, tokens continue the sequence that it summarizes."""
        context = RecurrenceContext.from_info(x, info, state, self.implementation)
        before = None if state is None else Mamba3State(state.ssm_state, state.B, state.x, state.turns)
        inputs = split_heads(self.x(x), self.head_dim)
        dt = jax.nn.softplus(self.dt(x).astype(jnp.float32) + self.dt_bias)
        A = -jnp.maximum(self.decay_rate(self.A(x).astype(jnp.float32)), self.min_decay_rate)
        angle = self.angle(x)[:, :, None]
        y, last = mamba3(
            _multiply_copies(inputs, self.mimo_x),
            dt,
            dt * A,
            jax.nn.sigmoid(self.trapezoid(x).astype(jnp.float32)),
            jnp.broadcast_to(angle, (*dt.shape, angle.shape[-1])),
            self._normalize_rows(self.B(x), self.B_norm, self.B_bias, inputs),
            self._normalize_rows(self.C(x), self.C_norm, self.C_bias, inputs),
            self.D,
            state=context.initial_state(before),
            token_mask=context.token_mask,
            segment_ids=context.segment_ids,
            implementation=context.implementation,
        )
        gate = _multiply_copies(split_heads(self.gate(x), self.head_dim), self.mimo_gate)
        y = self.out(self._gate_and_sum(y, gate))
        if state is None:
            return y, None
        return y, _Mamba3State(*last)

    def _normalize_rows(
        self,
        x: Float[Array, "batch seq features"],
        norm: RMSNorm,
        bias: Float[Array, "heads rank state"],
        heads: Float[Array, "batch seq heads _"],
    ) -> _Rows:
        """Return the vectors of B or C of each of these `heads`, normalized, with their biases in float32."""
        rank, state_dim = bias.shape[1:]
        groups = select_kv_heads(split_heads(x, rank * state_dim), heads, self.group)
        normed = norm(groups.reshape(*groups.shape[:3], rank, state_dim))
        rows = jnp.repeat(normed, heads.shape[2] // groups.shape[2], axis=2).swapaxes(2, 3)
        return rows.astype(jnp.float32) + bias.swapaxes(0, 1)

    def _gate_and_sum(self, y: _Rows, gate: _Rows) -> Float[Array, "batch seq features"]:
        """Gate the outputs of each rank, and sum them."""
        rows = (y.shape[0], y.shape[1] * y.shape[2], y.shape[3] * y.shape[4])
        if self.norm is None:
            gated = y * jax.nn.silu(gate)
        else:
            gated = self.norm(y.reshape(rows), gate.reshape(rows)).reshape(y.shape)
        if self.mimo_out is not None:
            gated = (gated * self.mimo_out.swapaxes(0, 1)).sum(2, keepdims=True).astype(y.dtype)
        return gated.reshape(*y.shape[:2], rows[2])


def _multiply_copies(x: Float[Array, "batch seq heads _"], vectors: Float[Array, "heads rank _"] | None) -> _Rows:
    """Return a copy of the heads for each vector, multiplied by it; one copy without vectors."""
    if vectors is None:
        return x[:, :, None]
    return (x[:, :, None] * vectors.swapaxes(0, 1)).astype(x.dtype)
