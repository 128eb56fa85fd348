"""Recurrent block of Griffin: a short convolution, a real-gated linear recurrent unit (RG-LRU), and an output gate. The
recurrence is `zoo.ops.recurrence.rg_lru`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.activations import gelu_tanh
from zoo.ops.recurrence.diagonal_scan import DIAGONAL_SCAN
from zoo.ops.recurrence.rg_lru import SHARPNESS, rg_lru
from zoo.ops.recurrence.stabilizer import NO_HISTORY
from zoo.parallel import Dim, Module, full_precision, implementation_option
from zoo.shapes import HiddenStates, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer
from ..convolution import ConvState, ShortConvolution
from ..kv_cache import require_positions
from ..linear import Linear
from ..token_info import TokenInfo
from .common import inverse_softplus
from .context import RecurrenceContext


class _RGLRUState(Module):
    """State of the RG-LRU, in float32, and of the convolution."""

    hidden: Float[Array, "batch features"]
    conv_state: ConvState

    features: Dim = eqx.field(static=True)


class RGLRU(AbstractMixer):
    """y = W_out [activation(W_gate x) * rg_lru(conv(W_in x))], where the two gates of `zoo.ops.recurrence.rg_lru` are
    block-diagonal projections, one block per head (Griffin, De et al., arXiv:2402.19427, sections 2.3 and 2.4). Heads
    are sharded over `tensor`."""

    shards_sequence = True
    per_head_linears = ("recurrence_gate", "input_gate")

    input: AbstractLinear
    gate: AbstractLinear
    convolution: ShortConvolution
    recurrence_gate: AbstractLinear
    input_gate: AbstractLinear
    decay: Float[Array, "features"] = full_precision()
    out: AbstractLinear

    features: Dim = eqx.field(static=True)
    activation: Callable = eqx.field(static=True)
    implementation: str = implementation_option(DIAGONAL_SCAN)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        inner: int | None = None,
        conv_width: int = 4,
        bias: bool = False,
        activation: Callable = gelu_tanh,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `inner`: features of the recurrence, `embed` by default.
        - `bias`: of W_in, W_gate and W_out; the convolution and the gates of the recurrence always have one.
        - `activation`: of the output gate.

        Decays with an open recurrence gate are initialized uniformly in [0.9, 0.999]. **Raises** `ValueError` if heads
        does not divide inner.
        """
        if inner is None:
            inner = embed
        if inner % heads:
            raise ValueError(f"inner={inner} features do not divide evenly over {heads} heads")
        size = inner // heads
        keys = jax.random.split(key, 7)
        embed_dim = Dim("embed")
        self.features = Dim("heads", size)
        project = partial(Linear, embed, inner, in_=embed_dim, out=self.features, bias=bias)
        self.input = project(key=keys[0])
        self.gate = project(key=keys[1])
        self.convolution = ShortConvolution(inner, conv_width, features=self.features, bias=True, key=keys[2])
        block_diagonal = partial(Linear, size, inner, in_=Dim("head_dim"), out=self.features, bias=True)
        self.recurrence_gate = block_diagonal(key=keys[3])
        self.input_gate = block_diagonal(key=keys[4])
        decays = jax.random.uniform(keys[5], (inner,), jnp.float32, minval=0.9, maxval=0.999)
        self.decay = inverse_softplus(-jnp.log(decays) / SHARPNESS)
        self.out = Linear(inner, embed, in_=self.features, out=embed_dim, bias=bias, scale=out_scale, key=keys[6])
        self.activation = activation
        self.implementation = implementation

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> _RGLRUState:
        hidden = jnp.zeros((batch, self.decay.shape[0]), jnp.float32)
        return _RGLRUState(hidden, self.convolution.init_state(batch, dtype), self.features)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: _RGLRUState | None = None
    ) -> tuple[ResidualStream, _RGLRUState | None]:
        """**Raises** `ValueError` for a state without positions: the first token of a sequence is not scaled by its
        gate."""
        require_positions(info, state)
        context = RecurrenceContext.from_info(x, info, state, self.implementation)
        conv_state = None if state is None else state.conv_state
        hidden = None if state is None else state.hidden
        inputs = context.mask_padding(self.input(x))
        inputs, conv_state = self.convolution(inputs, context, conv_state)
        heads = inputs.reshape(*inputs.shape[:2], -1, self.features.unit)
        recurrence_gate, input_gate = (
            gate.per_head(heads).reshape(inputs.shape) for gate in (self.recurrence_gate, self.input_gate)
        )
        if state is None:
            is_first = (jnp.arange(x.shape[1]) == 0) & context.fresh[:, None]
        else:
            is_first = info.positions == 0
        mixed, hidden = rg_lru(
            context.mask_padding(inputs),
            context.mask_padding(recurrence_gate, NO_HISTORY),
            input_gate,
            self.decay,
            is_first=is_first,
            state=context.initial_state(hidden),
            segment_ids=context.segment_ids,
            implementation=context.implementation,
        )
        y = self.out(self.activation(self.gate(x)) * mixed)
        if conv_state is None:
            return y, None
        return y, _RGLRUState(hidden, conv_state, self.features)
