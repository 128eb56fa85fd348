"""Short causal depthwise convolutions of recurrent mixers, and the token shift."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from zoo.ops.convolution import causal_conv1d, lag_inputs
from zoo.parallel import Dim, Module
from zoo.parallel.sequence import halo
from zoo.shapes import SegmentIds

from .recurrent.context import RecurrenceContext


class ConvState(Module):
    """Convolution state for decoding: the last width - 1 inputs, oldest first."""

    inputs: Float[Array, "batch conv features"]

    features: Dim = eqx.field(static=True)


class ShortConvolution(Module):
    """Causal depthwise convolution y_t = bias + sum over k < width of weight_{width-1-k} x_{t-k} (see
    `zoo.ops.convolution`). It does not cross segment boundaries. Inputs before the first token are zeros, the inputs in
    the `ConvState`, or, where the sequence is sharded, the last inputs of the previous shard.
    """

    weight: Float[Array, "features conv"]
    bias: Float[Array, "features"] | None

    features: Dim = eqx.field(static=True)

    def __init__(self, size: int, width: int, *, features: Dim, bias: bool = False, key: Key[Array, ""]):
        """Initialize the weight uniformly within ±1 / sqrt(width), like PyTorch's `Conv1d`, and the bias with zeros.

        **Raises** `ValueError` for a width below 1.
        """
        if width < 1:
            raise ValueError(f"a convolution is at least 1 token wide, the present one, not {width}")
        self.weight = jax.random.uniform(key, (size, width), jnp.float32, minval=-(width**-0.5), maxval=width**-0.5)
        self.bias = jnp.zeros(size, jnp.float32) if bias else None
        self.features = features

    @property
    def width(self) -> int:
        return self.weight.shape[-1]

    def init_state(self, batch: int, dtype: Any = jnp.float32) -> ConvState:
        return ConvState(jnp.zeros((batch, self.width - 1, self.weight.shape[0]), dtype), self.features)

    def __call__(
        self, x: Float[Array, "batch seq features"], context: RecurrenceContext, state: ConvState | None = None
    ) -> tuple[Float[Array, "batch seq features"], ConvState | None]:
        """Return the convolved inputs, and the updated state unless `state` is None.

        **Raises** `ValueError` if a shard of the sequence has fewer than width - 1 tokens.
        """
        inputs = _prepend_history(x, self.width - 1, context, state)
        y = causal_conv1d(inputs, self.weight, self.bias, _prepend_segment_ids(self.width - 1, context))
        return y.astype(x.dtype), _update_conv_state(inputs, self.width - 1, state)


def init_token_shift(batch: int, size: int, dtype: Any, *, features: Dim = Dim("features")) -> ConvState:
    """Return the empty state of a token shift: one zero token."""
    return ConvState(jnp.zeros((batch, 1, size), dtype), features)


def token_shift(
    x: Float[Array, "batch seq features"], context: RecurrenceContext, state: ConvState | None
) -> tuple[Float[Array, "batch seq features"], ConvState | None]:
    """Return the previous token of each (zero before the first), and the updated state unless `state` is None: RWKV's
    token shift (Peng et al., arXiv:2305.13048, section 3.1)."""
    inputs = _prepend_history(x, 1, context, state)
    previous = lag_inputs(inputs, 1, x.shape[1], _prepend_segment_ids(1, context))
    return previous, _update_conv_state(inputs, 1, state)


def _prepend_history(
    x: Float[Array, "batch seq features"], count: int, context: RecurrenceContext, state: ConvState | None
) -> Float[Array, "batch _ features"]:
    """Prepend the `count` previous inputs: from the state, from the previous shard, or zeros.

    With left padding, they are placed between the padding and a row's first real token, so that the last `count` inputs
    of the result are always the next state. A row whose padding is elsewhere gives NaN.
    """
    if state is None and context.axes:
        return jnp.concatenate([halo(x, count, context.axes), x], axis=1)
    if state is None:
        return jnp.pad(x, [(0, 0), (count, 0), (0, 0)])
    history = state.inputs.astype(x.dtype)
    extended = jnp.concatenate([history, x], axis=1)
    if context.token_mask is None or count == 0:
        return extended
    padding = (~context.token_mask).sum(1)
    write_row = lambda row, inputs, first: lax.dynamic_update_slice_in_dim(row, inputs, first, axis=0)
    extended = jax.vmap(write_row)(extended, history, padding)
    seq = x.shape[1]
    if seq == 1:
        return extended
    is_left = (context.token_mask == (jnp.arange(seq) >= padding[:, None])).all(1)
    return jnp.where(is_left[:, None, None], extended, jnp.nan)


def _prepend_segment_ids(count: int, context: RecurrenceContext) -> SegmentIds | None:
    """Prepend the segment ids of the `count` previous inputs; zero inputs count as the first token's segment."""
    ids = context.segment_ids
    if ids is None:
        return None
    if context.axes:
        return jnp.concatenate([halo(ids, count, context.axes), ids], axis=1)
    return jnp.pad(ids, [(0, 0), (count, 0)], mode="edge")


def _update_conv_state(
    inputs: Float[Array, "batch _ features"], count: int, state: ConvState | None
) -> ConvState | None:
    """Return the state of the last `count` inputs; None if `state` is None."""
    if state is None:
        return None
    return ConvState(inputs[:, inputs.shape[1] - count :].astype(state.inputs.dtype), state.features)
