"""Short causal depthwise convolutions of recurrent mixers, and the token shift."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

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
    """Causal depthwise convolution y_t = bias + sum over k < width of weight_{width-1-k} x_{t - k dilation} (see
    `zoo.ops.convolution`). It does not cross segment boundaries. Inputs before the first token are zeros, the inputs in
    the `ConvState`, or, where the sequence is sharded, the last inputs of the previous shard.
    """

    weight: Float[Array, "features conv"]
    bias: Float[Array, "features"] | None

    features: Dim = eqx.field(static=True)
    dilation: int = eqx.field(static=True)
    """Tokens from one tap to the next."""

    def __init__(
        self, size: int, width: int, *, features: Dim, dilation: int = 1, bias: bool = False, key: Key[Array, ""]
    ):
        """Initialize the weight uniformly within ±1 / sqrt(width), like PyTorch's `Conv1d`, and the bias with zeros.

        **Raises** `ValueError` for a width or a dilation below 1.
        """
        if width < 1 or dilation < 1:
            raise ValueError(
                f"a convolution is at least 1 token wide, the present one, not {width}, and its taps are at least 1 "
                f"token apart, not {dilation}"
            )
        self.weight = jax.random.uniform(key, (size, width), jnp.float32, minval=-(width**-0.5), maxval=width**-0.5)
        self.bias = jnp.zeros(size, jnp.float32) if bias else None
        self.features = features
        self.dilation = dilation

    @property
    def width(self) -> int:
        return self.weight.shape[-1]

    @property
    def history(self) -> int:
        """Tokens before the present one that the convolution reaches."""
        return (self.width - 1) * self.dilation

    def init_state(self, batch: int, dtype: Any = jnp.float32) -> ConvState:
        return ConvState(jnp.zeros((batch, self.history, self.weight.shape[0]), dtype), self.features)

    def __call__(
        self, x: Float[Array, "batch seq features"], context: RecurrenceContext, state: ConvState | None = None
    ) -> tuple[Float[Array, "batch seq features"], ConvState | None]:
        """Return the convolved inputs, and the updated state unless `state` is None.

        **Raises** `ValueError` if a shard of the sequence has fewer than `history` tokens.
        """
        inputs = extend_inputs(x, self.history, context, state)
        segment_ids = extend_segment_ids(self.history, context)
        if self.dilation == 1:
            y = causal_conv1d(inputs, self.weight, self.bias, segment_ids)
        else:
            y = self._convolve_dilated(inputs, x.shape[1], segment_ids)
        return y.astype(x.dtype), take_last(inputs, self.history, state)

    def _convolve_dilated(
        self, inputs: Float[Array, "batch _ features"], seq: int, segment_ids: Int[Array, "batch _"] | None
    ) -> Float[Array, "batch seq features"]:
        y = jnp.zeros((), jnp.float32) if self.bias is None else self.bias
        for tap in range(self.width):
            y = y + self.weight[:, ~tap] * lag_inputs(inputs, tap * self.dilation, seq, segment_ids)
        return y


def init_token_shift(batch: int, size: int, dtype: Any, *, features: Dim = Dim("features")) -> ConvState:
    """Return the empty state of a token shift: one zero token."""
    return ConvState(jnp.zeros((batch, 1, size), dtype), features)


def token_shift(
    x: Float[Array, "batch seq features"], context: RecurrenceContext, state: ConvState | None
) -> tuple[Float[Array, "batch seq features"], ConvState | None]:
    """Return the previous token of each (zero before the first), and the updated state unless `state` is None: RWKV's
    token shift (Peng et al., arXiv:2305.13048, section 3.1)."""
    inputs = extend_inputs(x, 1, context, state)
    previous = lag_inputs(inputs, 1, x.shape[1], extend_segment_ids(1, context))
    return previous, take_last(inputs, 1, state)


def extend_inputs(
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


def extend_segment_ids(count: int, context: RecurrenceContext) -> SegmentIds | None:
    """Prepend the segment ids of the `count` previous inputs; zero inputs count as the first token's segment."""
    ids = context.segment_ids
    if ids is None:
        return None
    if context.axes:
        return jnp.concatenate([halo(ids, count, context.axes), ids], axis=1)
    return jnp.pad(ids, [(0, 0), (count, 0)], mode="edge")


def take_last(inputs: Float[Array, "batch _ features"], count: int, state: ConvState | None) -> ConvState | None:
    """Return the state of the last `count` inputs; None if `state` is None."""
    if state is None:
        return None
    return ConvState(inputs[:, inputs.shape[1] - count :].astype(state.inputs.dtype), state.features)
