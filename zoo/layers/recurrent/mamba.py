"""Mamba: the selective state-space model as a layer. The recurrence is `zoo.ops.mamba.selective_scan`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.chunks import RecurrenceMode
from zoo.ops.recurrence.mamba import selective_scan
from zoo.parallel import Dim, Module, full_precision, implementation_option
from zoo.shapes import HiddenStates

from ..abstract import AbstractLinear, AbstractMixer, AbstractNorm
from ..convolution import ConvState, ShortConvolution
from ..linear import Linear
from ..token_info import TokenInfo
from .common import inverse_softplus, sample_log_uniform
from .context import RecurrenceContext


class MambaState(Module):
    """What it remembers, as large after a million tokens as after one: the state of each channel, in float32, and the
    last inputs of its convolution."""

    memory: Float[Array, "batch inner state"]
    window: ConvState


class Mamba(AbstractMixer):
    """The Mamba block (Gu & Dao, arXiv:2312.00752, section 3.4, figure 3):

        x = silu(conv(W_x u)),    B = W_B x,    C = W_C x
        dt = softplus(W_up W_down x + dt_bias),    A = -exp(A_log)
        h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,    o_t = C_t · h_t + D x_t
        y = W_out (o * silu(W_gate u))

    u being the stream; x and dt are a number a channel, A `state` numbers a channel, B and C are shared by all. The
    paper's letters stay as they are. With a `norm`, W_down x, B and C are normed first (Falcon Mamba, arXiv:2410.05355,
    section 3.1; Jamba). A_log, D and dt_bias keep their dtype under `cast`; steps and decays are float32 whatever the
    activations are.

    Channels are split over `tensor`: B, C and W_down x, which contract them, are summed and lie whole.
    """

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
    A_log: Float[Array, "inner state"] = full_precision()
    D: Float[Array, "inner"] = full_precision()
    out: AbstractLinear

    mode: RecurrenceMode = implementation_option()

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
        mode: RecurrenceMode = "chunked",
        key: Key[Array, ""],
    ):
        """- `inner`: how many channels there are, `2 * embed` unless given; `state`: how many numbers each remembers.
        - `rank`: of the matrix that makes steps, `embed / 16` rounded up unless given.
        - `width`: of the convolution; `convolution_bias`: whether it has a bias, as `bias` says of the matrices that
          read the stream or write to it.
        - `norm`: of W_down x, B and C, called with a size and `features=`.

        A starts at -1, ..., -state in every channel, D at 1, W_up with a deviation of rank^-1/2 / sqrt(3), which is
        that of the uniform numbers within ±rank^-1/2 of the paper's code, and dt_bias so that steps are log-uniform in
        [0.001, 0.1] where W_up W_down x is 0 (section 3.6).

        **Raises** `ValueError` for a size below 1.
        """
        inner, rank = 2 * embed if inner is None else inner, -(-embed // 16) if rank is None else rank
        sizes = {"inner": inner, "state": state_dim, "rank": rank}
        if wrong := [name for name, size in sizes.items() if size < 1]:
            raise ValueError(f"{wrong[0]} is {sizes[wrong[0]]}, and a size is at least 1")
        keys = jax.random.split(key, 9)
        stream, channels, ranks, states = Dim("embed"), Dim("inner"), Dim("rank"), Dim("state")
        read = partial(Linear, embed, inner, in_=stream, out=channels, bias=bias)
        self.gate, self.x = read(key=keys[0]), read(key=keys[1])
        self.convolution = ShortConvolution(inner, conv_width, features=channels, bias=conv_bias, key=keys[2])
        self.dt_down = Linear(inner, rank, in_=channels, out=ranks, key=keys[3])
        self.B, self.C = (Linear(inner, state_dim, in_=channels, out=states, key=key) for key in keys[4:6])
        self.dt_norm = None if norm is None else norm(rank, features=ranks)
        self.B_norm, self.C_norm = (None if norm is None else norm(state_dim, features=states) for _ in range(2))
        self.dt_up = Linear(rank, inner, in_=ranks, out=channels, scale=3**-0.5, key=keys[6])
        self.dt_bias = inverse_softplus(sample_log_uniform(keys[7], inner, 1e-3, 1e-1))
        self.A_log = jnp.broadcast_to(jnp.log1p(jnp.arange(state_dim)), (inner, state_dim))
        self.D = jnp.ones(inner)
        self.out = Linear(inner, embed, in_=channels, out=stream, bias=bias, scale=out_scale, key=keys[8])
        self.mode = mode

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> MambaState:
        memory = jnp.zeros((batch, *self.A_log.shape), jnp.float32)
        return MambaState(memory, self.convolution.init_state(batch, dtype))

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: MambaState | None = None
    ) -> tuple[HiddenStates, MambaState | None]:
        """With a `state` the tokens follow those that it has seen."""
        course, gate = RecurrenceContext.from_info(x, info, state, self.mode), jax.nn.silu(self.gate(x))
        convolved, window = self.convolution(self.x(x), course, None if state is None else state.window)
        inputs = jax.nn.silu(convolved)
        steps = self.dt_up(_apply_norm(self.dt_norm, self.dt_down(inputs))).astype(jnp.float32)
        y, memory = selective_scan(
            inputs,
            course.mask_padding(jax.nn.softplus(steps + self.dt_bias)),
            -jnp.exp(self.A_log.astype(jnp.float32)),
            _apply_norm(self.B_norm, self.B(inputs)),
            _apply_norm(self.C_norm, self.C(inputs)),
            self.D,
            state=None if state is None else state.memory,
            segment_ids=course.segment_ids,
            mode=course.mode,
        )
        return self.out(y * gate), None if window is None else MambaState(memory, window)


def _apply_norm(norm: AbstractNorm | None, x: Float[Array, "batch seq features"]) -> Float[Array, "batch seq features"]:
    return x if norm is None else norm(x)
