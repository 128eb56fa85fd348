"""Mamba-2: state-space duality (SSD). The recurrence is `zoo.ops.recurrence.mamba2.ssd`."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.gated_linear import GATED_LINEAR
from zoo.ops.recurrence.mamba2 import ssd
from zoo.parallel import Dim, Module, full_precision, implementation_option
from zoo.shapes import HiddenStates, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer
from ..convolution import ConvState, ShortConvolution
from ..heads import select_kv_heads
from ..linear import Linear
from ..token_info import TokenInfo
from .common import inverse_softplus, sample_log_uniform
from .context import RecurrenceContext
from .gated_norm import GatedGroupNorm

_PROJECTIONS = ("gate", "x", "B", "C", "dt")
"""Projections of the input, in the order of `multipliers`."""
_StepLimits = tuple[float | int, float | int]


class _Mamba2State(Module):
    """Recurrent state: the SSM state of each head, in float32, and the states of the three convolutions. Its size does
    not depend on the sequence length."""

    ssm_state: Float[Array, "batch heads head_dim state"]
    x: ConvState
    B: ConvState
    C: ConvState


class Mamba2(AbstractMixer):
    """The Mamba-2 block (Dao & Gu, arXiv:2405.21060, section 7.1, figure 6, all projections at the block's start):

        x, B, C = silu(conv(W_x u)), silu(conv(W_B u)), silu(conv(W_C u))
        dt = clip(softplus(W_dt u + dt_bias), *dt_limit),    A = -exp(A_log)
        h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_tᵀ,           o_t = h_t C_t + D x_t
        y = W_out norm(o * silu(W_gate u))

    u is the input; A, D and dt have one value per head, B and C have `state_dim` values per group of heads (the paper's
    letters), and the norm is over the channels of a group (`GatedGroupNorm`). A_log, D and dt_bias keep their dtype
    under `cast`; dt and decays are float32.

    Heads and groups are sharded over `tensor`; one of them is never divided. With fewer groups than devices on that
    axis, B and C are replicated and each device selects the groups of its heads.
    """

    shards_sequence = True

    gate: AbstractLinear
    x: AbstractLinear
    B: AbstractLinear
    C: AbstractLinear
    dt: AbstractLinear
    x_convolution: ShortConvolution
    B_convolution: ShortConvolution
    C_convolution: ShortConvolution
    dt_bias: Float[Array, "heads"] = full_precision()
    A_log: Float[Array, "heads"] = full_precision()
    D: Float[Array, "skips"] = full_precision()
    norm: GatedGroupNorm | None
    out: AbstractLinear

    skips: Dim = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Heads per group."""
    state_dim: int = eqx.field(static=True)
    dt_limit: tuple[float, float] = eqx.field(static=True)
    multipliers: tuple[float, ...] | None = eqx.field(static=True)
    """Factors of gate, x, B, C and dt, after their projections; None without."""
    implementation: str = implementation_option(GATED_LINEAR)

    def __init__(
        self,
        embed: int,
        heads: int | None = None,
        *,
        head_dim: int = 64,
        groups: int = 1,
        state_dim: int = 128,
        expand: int = 2,
        conv_width: int = 4,
        bias: bool = False,
        out_bias: bool | None = None,
        conv_bias: bool = True,
        norm: bool = True,
        norm_before_gate: bool = False,
        D_per_channel: bool = False,
        epsilon: float | int = 1e-5,
        dt_limit: _StepLimits = (0.0, float("inf")),
        multipliers: tuple[float, ...] | None = None,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `heads`: `expand * embed / head_dim` by default, a multiple of `groups`.
        - `state_dim`: SSM state size per channel.
        - `conv_width` and `conv_bias`: of the convolutions. `bias`: of the linear projections; `out_bias`: of W_out, if
          it differs.
        - `norm`: if False, y = W_out (o * silu(W_gate u)). `norm_before_gate`: norm(o) * silu(W_gate u).
        - `D_per_channel`: D has one value per channel of a head.
        - `epsilon`: of that norm. `dt_limit`: lower and upper bound of dt.
        - `multipliers`: of what W_gate, W_x, W_B, W_C and W_dt give, with their biases (Falcon-H1, arXiv:2507.22448).

        A is initialized uniformly in [-16, -1], D to 1, and dt_bias such that softplus(dt_bias) is log-uniform in
        [0.001, 0.1] (the paper's code, and arXiv:2312.00752, section 3.6).

        **Raises** `ValueError` for a size below 1, if groups does not divide heads or head_dim does not divide
        `expand * embed`, unless 0 <= dt_limit[0] < dt_limit[1], and for another number of multipliers than five.
        """
        if heads is None and (head_dim < 1 or expand * embed % head_dim):
            raise ValueError(f"expand * embed = {expand * embed} does not divide evenly over heads {head_dim} wide")
        if heads is None:
            heads = expand * embed // head_dim
        sizes = {"heads": heads, "head_dim": head_dim, "groups": groups, "state_dim": state_dim}
        if wrong := [name for name, size in sizes.items() if size < 1]:
            raise ValueError(f"{wrong[0]} is {sizes[wrong[0]]}, and a size is at least 1")
        if heads % groups:
            raise ValueError(f"{heads} heads do not divide evenly over {groups} groups")
        low, high = map(float, dt_limit)
        if not 0 <= low < high:
            raise ValueError(f"dt_limit = {tuple(dt_limit)}: steps are at least 0, and the second limit is the larger")
        if multipliers is not None and len(multipliers) != len(_PROJECTIONS):
            raise ValueError(f"multipliers are five, of {', '.join(_PROJECTIONS)}, and {len(multipliers)} were given")
        if out_bias is None:
            out_bias = bias
        keys = jax.random.split(key, 11)
        embed_dim = Dim("embed")
        head_channels = Dim("heads", head_dim)
        group_states = Dim("groups", state_dim)
        project = partial(Linear, embed, in_=embed_dim, bias=bias)
        self.gate = project(heads * head_dim, out=head_channels, key=keys[0])
        self.x = project(heads * head_dim, out=head_channels, key=keys[1])
        self.B, self.C = (project(groups * state_dim, out=group_states, key=key) for key in keys[2:4])
        self.dt = project(heads, out=Dim("heads"), key=keys[4])
        convolution = partial(ShortConvolution, width=conv_width, bias=conv_bias)
        self.x_convolution = convolution(heads * head_dim, features=head_channels, key=keys[5])
        self.B_convolution, self.C_convolution = (
            convolution(groups * state_dim, features=group_states, key=key) for key in keys[6:8]
        )
        self.dt_bias = inverse_softplus(sample_log_uniform(keys[8], heads, 1e-3, 1e-1))
        self.A_log = jnp.log(jax.random.uniform(keys[9], (heads,), jnp.float32, minval=1.0, maxval=16.0))
        self.skips = Dim("heads", head_dim if D_per_channel else 1)
        self.D = jnp.ones(heads * self.skips.unit, jnp.float32)
        gated_norm = partial(
            GatedGroupNorm, heads, head_dim, groups, norm_before_gate=norm_before_gate, epsilon=epsilon
        )
        self.norm = gated_norm() if norm else None
        self.out = Linear(
            heads * head_dim, embed, in_=head_channels, out=embed_dim, bias=out_bias, scale=out_scale, key=keys[10]
        )
        self.head_dim = head_dim
        self.group = heads // groups
        self.state_dim = state_dim
        self.dt_limit = (low, high)
        self.multipliers = multipliers
        self.implementation = implementation

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> _Mamba2State:
        ssm_state = jnp.zeros((batch, self.A_log.shape[0], self.head_dim, self.state_dim), jnp.float32)
        convolutions = self.x_convolution, self.B_convolution, self.C_convolution
        return _Mamba2State(ssm_state, *(convolution.init_state(batch, dtype) for convolution in convolutions))

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: _Mamba2State | None = None
    ) -> tuple[ResidualStream, _Mamba2State | None]:
        """With a `state`, tokens continue the sequence that it summarizes."""
        context = RecurrenceContext.from_info(x, info, state, self.implementation)
        x_state = None if state is None else state.x
        B_state = None if state is None else state.B
        C_state = None if state is None else state.C
        ssm_state = None if state is None else state.ssm_state
        inputs, x_state = self._convolve_heads(
            self._project("x", x), self.x_convolution, context, x_state, self.head_dim
        )
        B, B_state = self._convolve_heads(self._project("B", x), self.B_convolution, context, B_state, self.state_dim)
        C, C_state = self._convolve_heads(self._project("C", x), self.C_convolution, context, C_state, self.state_dim)
        y, ssm_state = ssd(
            inputs,
            context.mask_padding(self._compute_dt(x)),
            -jnp.exp(self.A_log.astype(jnp.float32)),
            select_kv_heads(B, inputs, self.group),
            select_kv_heads(C, inputs, self.group),
            self.D,
            state=context.initial_state(ssm_state),
            segment_ids=context.segment_ids,
            implementation=context.implementation,
        )
        y = y.reshape(*y.shape[:2], -1)
        gate = self._project("gate", x)
        y = y * jax.nn.silu(gate) if self.norm is None else self.norm(y, gate)
        y = self.out(y)
        if x_state is None or B_state is None or C_state is None:
            return y, None
        return y, _Mamba2State(ssm_state, x_state, B_state, C_state)

    def _project(self, name: str, x: HiddenStates) -> Float[Array, "batch seq features"]:
        """Return what a projection gives, times its multiplier."""
        y = getattr(self, name)(x)
        if self.multipliers is None:
            return y
        return self.multipliers[_PROJECTIONS.index(name)] * y

    def _compute_dt(self, x: HiddenStates) -> Float[Array, "batch seq heads"]:
        """Return the step size dt of each token and head, in float32."""
        dt = jax.nn.softplus(self._project("dt", x).astype(jnp.float32) + self.dt_bias)
        if self.dt_limit == (0.0, float("inf")):
            return dt
        return jnp.clip(dt, *self.dt_limit)

    def _convolve_heads(
        self,
        x: Float[Array, "batch seq features"],
        convolution: ShortConvolution,
        context: RecurrenceContext,
        state: ConvState | None,
        size: int,
    ) -> tuple[Float[Array, "batch seq units {size}"], ConvState | None]:
        """Return silu(conv(x)) by heads or groups of this size, and the updated state unless `state` is None."""
        y, state = convolution(x, context, state)
        return jax.nn.silu(y).reshape(*y.shape[:2], -1, size), state
