"""Short convolutions along time, one filter a feature, as recurrent mixers have them before they mix."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from zoo.ops.convolution import convolved, lagged
from zoo.parallel import Dim, Module

from .course import Course


class Window(Module):
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

    def init_state(self, batch: int, dtype: Any = jnp.float32) -> Window:
        return Window(jnp.zeros((batch, self.width - 1, self.weight.shape[0]), dtype), self.features)

    def __call__(
        self, x: Float[Array, "batch seq features"], course: Course, state: Window | None = None
    ) -> tuple[Float[Array, "batch seq features"], Window | None]:
        """The sums; and the last inputs, where those before came."""
        seen = behind(x, self.width - 1, course, state)
        y = convolved(seen, self.weight, self.bias, course.segment_ids)
        return y.astype(x.dtype), after(seen, self.width - 1, state)


def no_token(batch: int, size: int, dtype: Any, *, features: Dim = Dim("features")) -> Window:
    """A window of one token before there was any."""
    return Window(jnp.zeros((batch, 1, size), dtype), features)


def shifted(
    x: Float[Array, "batch seq features"], course: Course, window: Window | None
) -> tuple[Float[Array, "batch seq features"], Window | None]:
    """The token before each, zero before the first; and the last, where the one before came: RWKV's token shift (Peng
    et al., arXiv:2305.13048, section 3.1)."""
    seen = behind(x, 1, course, window)
    return lagged(seen, 1, x.shape[1], course.segment_ids), after(seen, 1, window)


def behind(
    x: Float[Array, "batch seq features"], count: int, course: Course, state: Window | None
) -> Float[Array, "batch _ features"]:
    """The inputs, and in front of them the `count` before: zeros without a state.

    What a state remembers stands right before a row's first real token, and padding before that: so that the last
    `count` are always those to remember, whatever the padding.
    """
    if state is None:
        return jnp.pad(x, [(0, 0), (count, 0), (0, 0)])
    together = jnp.concatenate([state.inputs.astype(x.dtype), x], axis=1)
    if course.real is None or count == 0:
        return together
    padding = (~course.real).sum(1)
    place = lambda row, inputs, first: lax.dynamic_update_slice_in_dim(row, inputs, first, axis=0)
    return jax.vmap(place)(together, state.inputs.astype(x.dtype), padding)


def after(seen: Float[Array, "batch _ features"], count: int, state: Window | None) -> Window | None:
    """What the next tokens will want of these, where there was a state."""
    if state is None:
        return None
    return Window(seen[:, seen.shape[1] - count :].astype(state.inputs.dtype), state.features)
