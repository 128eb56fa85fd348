"""Short convolutions along time, one filter a feature, as recurrent mixers have them before they mix."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from zoo.ops.convolution import causal_conv1d, lag_inputs
from zoo.parallel import Dim, Module

from .recurrent.context import RecurrenceContext


class ConvState(Module):
    """The last inputs of a convolution, oldest first: one fewer than its width."""

    inputs: Float[Array, "batch conv features"]

    features: Dim = eqx.field(static=True)


class ShortConvolution(Module):
    """y_t = bias + sum over k < width of weight_{width-1-k} x_{t-k}, each feature by itself, as `zoo.ops.convolution`
    has it. Nothing crosses the border of a segment. Before the first token there are zeros, or the inputs that a state
    remembers.
    """

    weight: Float[Array, "features conv"]
    bias: Float[Array, "features"] | None

    features: Dim = eqx.field(static=True)

    def __init__(self, size: int, width: int, *, features: Dim, bias: bool = False, key: Key[Array, ""]):
        """Weights are uniform within ±1 / sqrt(width), as `Conv1d` draws them; the bias is zero.

        **Raises** `ValueError` for a width below 1.
        """
        if width < 1:
            raise ValueError(f"a convolution is at least 1 token wide, the present one, not {width}")
        self.weight = jax.random.uniform(key, (size, width), minval=-(width**-0.5), maxval=width**-0.5)
        self.bias = jnp.zeros(size) if bias else None
        self.features = features

    @property
    def width(self) -> int:
        return self.weight.shape[-1]

    def init_state(self, batch: int, dtype: Any = jnp.float32) -> ConvState:
        return ConvState(jnp.zeros((batch, self.width - 1, self.weight.shape[0]), dtype), self.features)

    def __call__(
        self, x: Float[Array, "batch seq features"], context: RecurrenceContext, state: ConvState | None = None
    ) -> tuple[Float[Array, "batch seq features"], ConvState | None]:
        """The sums; and the last inputs, where those before came."""
        seen = _prepend_history(x, self.width - 1, context, state)
        y = causal_conv1d(seen, self.weight, self.bias, context.segment_ids)
        return y.astype(x.dtype), _update_conv_state(seen, self.width - 1, state)


def init_token_shift(batch: int, size: int, dtype: Any, *, features: Dim = Dim("features")) -> ConvState:
    """A window of one token before there was any."""
    return ConvState(jnp.zeros((batch, 1, size), dtype), features)


def token_shift(
    x: Float[Array, "batch seq features"], context: RecurrenceContext, state: ConvState | None
) -> tuple[Float[Array, "batch seq features"], ConvState | None]:
    """The token before each, zero before the first; and the last, where the one before came: RWKV's token shift (Peng
    et al., arXiv:2305.13048, section 3.1)."""
    seen = _prepend_history(x, 1, context, state)
    return lag_inputs(seen, 1, x.shape[1], context.segment_ids), _update_conv_state(seen, 1, state)


def _prepend_history(
    x: Float[Array, "batch seq features"], count: int, context: RecurrenceContext, state: ConvState | None
) -> Float[Array, "batch _ features"]:
    """The inputs, and in front of them the `count` before: zeros without a state.

    What a state remembers stands right before a row's first real token, and padding before that: so that the last
    `count` are always those to remember, whatever the padding.
    """
    if state is None:
        return jnp.pad(x, [(0, 0), (count, 0), (0, 0)])
    together = jnp.concatenate([state.inputs.astype(x.dtype), x], axis=1)
    if context.token_mask is None or count == 0:
        return together
    padding = (~context.token_mask).sum(1)
    place = lambda row, inputs, first: lax.dynamic_update_slice_in_dim(row, inputs, first, axis=0)
    return jax.vmap(place)(together, state.inputs.astype(x.dtype), padding)


def _update_conv_state(seen: Float[Array, "batch _ features"], count: int, state: ConvState | None) -> ConvState | None:
    """What the next tokens will want of these, where there was a state."""
    if state is None:
        return None
    return ConvState(seen[:, seen.shape[1] - count :].astype(state.inputs.dtype), state.features)
