"""Griffin's recurrent block: a convolution, a real-gated linear recurrent unit, and a gate beside them. The recurrence
is `zoo.ops.rg_lru`."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.chunks import RecurrenceMode
from zoo.ops.recurrence.rg_lru import SHARPNESS, rg_lru
from zoo.ops.recurrence.stabilizer import NO_HISTORY
from zoo.parallel import Dim, Module, full_precision, implementation_option
from zoo.shapes import HiddenStates

from ..abstract import AbstractLinear, AbstractMixer
from ..convolution import ConvState, ShortConvolution
from ..kv_cache import require_positions
from ..linear import Linear
from ..token_info import TokenInfo
from .common import inverse_softplus
from .context import RecurrenceContext


class _RGLRUState(Module):
    """What it remembers: the unit's state, in float32, and the last inputs of its convolution."""

    hidden: Float[Array, "batch features"]
    window: ConvState

    features: Dim = eqx.field(static=True)


class RGLRU(AbstractMixer):
    """y = W_out [gelu(W_gate x) * unit(conv(W_in x))], with the unit of `zoo.ops.rg_lru`, whose two gates are matrices
    of each head's features (Griffin, De et al., arXiv:2402.19427, sections 2.3 and 2.4). Heads are split over
    `tensor`."""

    input: AbstractLinear
    gate: AbstractLinear
    convolution: ShortConvolution
    recurrence_gate: AbstractLinear
    input_gate: AbstractLinear
    decay: Float[Array, "features"] = full_precision()
    out: AbstractLinear

    features: Dim = eqx.field(static=True)
    mode: RecurrenceMode = implementation_option()

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        inner: int | None = None,
        conv_width: int = 4,
        out_scale: float = 1.0,
        mode: RecurrenceMode = "chunked",
        key: Key[Array, ""],
    ):
        """- `inner`: how many features recur, `embed` unless given; heads share them out.
        - `width`: of the convolution.

        Decays start uniform in [0.9, 0.999] where the recurrence gate is open. **Raises** `ValueError` where heads do
        not divide `inner`.
        """
        inner = embed if inner is None else inner
        if inner % heads:
            raise ValueError(f"inner={inner} features do not share out over {heads} heads")
        size = inner // heads
        keys = jax.random.split(key, 7)
        stream, self.features = Dim("embed"), Dim("heads", size)
        read = partial(Linear, embed, inner, in_=stream, out=self.features)
        self.input, self.gate = read(key=keys[0]), read(key=keys[1])
        self.convolution = ShortConvolution(inner, conv_width, features=self.features, bias=True, key=keys[2])
        block = partial(Linear, size, inner, in_=Dim("head_dim"), out=self.features, bias=True)
        self.recurrence_gate, self.input_gate = block(key=keys[3]), block(key=keys[4])
        decays = jax.random.uniform(keys[5], (inner,), minval=0.9, maxval=0.999)
        self.decay = inverse_softplus(-jnp.log(decays) / SHARPNESS)
        self.out = Linear(inner, embed, in_=self.features, out=stream, scale=out_scale, key=keys[6])
        self.mode = mode

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> _RGLRUState:
        hidden = jnp.zeros((batch, self.decay.shape[0]), jnp.float32)
        return _RGLRUState(hidden, self.convolution.init_state(batch, dtype), self.features)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: _RGLRUState | None = None
    ) -> tuple[HiddenStates, _RGLRUState | None]:
        """**Raises** `ValueError` for a state without positions: the first token of a text comes in whole."""
        require_positions(info, state)
        course = RecurrenceContext.from_info(x, info, state, self.mode)
        inputs = course.mask_padding(self.input(x))
        inputs, window = self.convolution(inputs, course, None if state is None else state.window)
        heads = inputs.reshape(*inputs.shape[:2], -1, self.features.unit)
        recurrence, entrance = (
            gate.per_head(heads).reshape(inputs.shape) for gate in (self.recurrence_gate, self.input_gate)
        )
        mixed, hidden = rg_lru(
            course.mask_padding(inputs),
            course.mask_padding(recurrence, NO_HISTORY),
            entrance,
            self.decay,
            is_first=None if state is None else info.positions == 0,
            state=None if state is None else state.hidden,
            segment_ids=course.segment_ids,
            mode=course.mode,
        )
        y = self.out(jax.nn.gelu(self.gate(x)) * mixed)
        return y, None if window is None else _RGLRUState(hidden, window, self.features)
