"""Mamba: a selective state-space model. The recurrence is `zoo.ops.recurrence.mamba.selective_scan`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.mamba import SELECTIVE_SCAN, selective_scan
from zoo.parallel import Dim, Module, full_precision, implementation_option, no_weight_decay
from zoo.shapes import HiddenStates, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer, AbstractNorm
from ..convolution import ConvState, ShortConvolution
from ..linear import Linear
from ..token_info import TokenInfo
from .common import inverse_softplus, sample_log_uniform
from .context import RecurrenceContext


class MambaState(Module):
    """Recurrent state: the SSM state of each channel, in float32, and the convolution state. Its size does not depend
    on the sequence length."""

    ssm_state: Float[Array, "batch inner state"]
    conv_state: ConvState


class Mamba(AbstractMixer):
    """The Mamba block (Gu & Dao, arXiv:2312.00752, section 3.4, figure 3):

        x = silu(conv(W_x u)),    B = W_B x,    C = W_C x
        dt = softplus(W_up W_down x + dt_bias),    A = -exp(A_log)
        h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,    o_t = C_t · h_t + D x_t
        y = W_out (o * silu(W_gate u))

    u is the input; x and dt have one value per channel, A has `state_dim` values per channel, B and C are shared by all
    channels (the paper's letters). With a `norm`, W_down x, B and C are normalized first (Falcon Mamba,
    arXiv:2410.05355, section 3.1; Jamba). A_log, D and dt_bias keep their dtype under `cast`; dt and decays are
    float32.

    Channels are sharded over `tensor`. B, C and W_down x contract them, and are all-reduced and replicated.
    """

    shards_sequence = True

    gate: AbstractLinear
    x: AbstractLinear
    convolution: ShortConvolution
    dt_down: AbstractLinear
    B: AbstractLinear
    C: AbstractLinear
    dt_norm: AbstractNorm | None
    B_norm: AbstractNorm | None
    C_norm: AbstractNorm | None
    dt_up: AbstractLinear
    dt_bias: Float[Array, "inner"] = full_precision()
    A_log: Float[Array, "inner state"] = no_weight_decay(full_precision=True)
    D: Float[Array, "inner"] = full_precision()
    out: AbstractLinear

    implementation: str = implementation_option(SELECTIVE_SCAN)

    def __init__(
        self,
        embed: int,
        *,
        inner: int | None = None,
        state_dim: int = 16,
        rank: int | None = None,
        conv_width: int = 4,
        bias: bool = False,
        conv_bias: bool = True,
        norm: Callable[..., AbstractNorm] | None = None,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `inner`: number of channels, `2 * embed` by default; `state_dim`: SSM state size per channel.
        - `rank`: of W_up W_down, `embed / 16` rounded up by default.
        - `conv_width` and `conv_bias`: of the convolution. `bias`: of the projections from and to embed.
        - `norm`: factory of the norms of W_down x, B and C, called with a size and `features=`.

        A is initialized to -1, ..., -state_dim in every channel, D to 1, W_up with standard deviation rank^-1/2 /
        sqrt(3), as in the paper's uniform distribution within ±rank^-1/2, and dt_bias such that softplus(dt_bias) is
        log-uniform in [0.001, 0.1] (section 3.6).

        **Raises** `ValueError` for a size below 1.
        """
        if inner is None:
            inner = 2 * embed
        if rank is None:
            rank = -(-embed // 16)
        sizes = {"inner": inner, "state_dim": state_dim, "rank": rank}
        if wrong := [name for name, size in sizes.items() if size < 1]:
            raise ValueError(f"{wrong[0]} is {sizes[wrong[0]]}, and a size is at least 1")
        keys = jax.random.split(key, 9)
        embed_dim = Dim("embed")
        channel_dim = Dim("inner")
        rank_dim = Dim("rank")
        ssm_dim = Dim("state")
        project = partial(Linear, embed, inner, in_=embed_dim, out=channel_dim, bias=bias)
        self.gate = project(key=keys[0])
        self.x = project(key=keys[1])
        self.convolution = ShortConvolution(inner, conv_width, features=channel_dim, bias=conv_bias, key=keys[2])
        self.dt_down = Linear(inner, rank, in_=channel_dim, out=rank_dim, key=keys[3])
        self.B, self.C = (Linear(inner, state_dim, in_=channel_dim, out=ssm_dim, key=key) for key in keys[4:6])
        if norm is None:
            self.dt_norm = None
            self.B_norm = None
            self.C_norm = None
        else:
            self.dt_norm = norm(rank, features=rank_dim)
            self.B_norm = norm(state_dim, features=ssm_dim)
            self.C_norm = norm(state_dim, features=ssm_dim)
        self.dt_up = Linear(rank, inner, in_=rank_dim, out=channel_dim, scale=3**-0.5, key=keys[6])
        self.dt_bias = inverse_softplus(sample_log_uniform(keys[7], inner, 1e-3, 1e-1))
        self.A_log = jnp.broadcast_to(jnp.log1p(jnp.arange(state_dim, dtype=jnp.float32)), (inner, state_dim))
        self.D = jnp.ones(inner, jnp.float32)
        self.out = Linear(inner, embed, in_=channel_dim, out=embed_dim, bias=bias, scale=out_scale, key=keys[8])
        self.implementation = implementation

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> MambaState:
        ssm_state = jnp.zeros((batch, *self.A_log.shape), jnp.float32)
        return MambaState(ssm_state, self.convolution.init_state(batch, dtype))

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: MambaState | None = None
    ) -> tuple[ResidualStream, MambaState | None]:
        """With a `state`, tokens continue the sequence that it summarizes."""
        context = RecurrenceContext.from_info(x, info, state, self.implementation)
        conv_state = None if state is None else state.conv_state
        ssm_state = None if state is None else state.ssm_state
        gate = jax.nn.silu(self.gate(x))
        convolved, conv_state = self.convolution(self.x(x), context, conv_state)
        inputs = jax.nn.silu(convolved)
        dt = self.dt_up(_apply_norm(self.dt_norm, self.dt_down(inputs))).astype(jnp.float32)
        y, ssm_state = selective_scan(
            inputs,
            context.mask_padding(jax.nn.softplus(dt + self.dt_bias)),
            -jnp.exp(self.A_log.astype(jnp.float32)),
            _apply_norm(self.B_norm, self.B(inputs)),
            _apply_norm(self.C_norm, self.C(inputs)),
            self.D,
            state=context.initial_state(ssm_state),
            segment_ids=context.segment_ids,
            implementation=context.implementation,
        )
        y = self.out(y * gate)
        if conv_state is None:
            return y, None
        return y, MambaState(ssm_state, conv_state)


def _apply_norm(norm: AbstractNorm | None, x: Float[Array, "batch seq features"]) -> Float[Array, "batch seq features"]:
    if norm is None:
        return x
    return norm(x)
