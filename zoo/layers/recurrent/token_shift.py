"""RWKV's token shift: projections read a mixture of a token's vector and the one before it."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.parallel import Module
from zoo.shapes import HiddenStates

from ..abstract import AbstractLinear
from ..convolution import ConvState, init_token_shift, token_shift
from .common import RecurrentState
from .context import RecurrenceContext


class TokenShift(Module):
    """x + (previous - x) * weight: between a token's vector and the one before (Peng et al., RWKV, arXiv:2305.13048,
    section 3.1). With `adjust` the weight depends on the token: weight + adjust(mixture), the data-dependent shift of
    RWKV-6 (arXiv:2404.05892, section 4.1)."""

    weight: Float[Array, "embed"]
    adjust: AbstractLinear | None

    def __init__(self, embed: int, *, adjust: AbstractLinear | None = None):
        """Weights start at a half."""
        self.weight, self.adjust = jnp.full(embed, 0.5), adjust

    def __call__(self, x: HiddenStates, delta: HiddenStates, mixture: HiddenStates | None = None) -> HiddenStates:
        """`change` is the previous vector less the present one; `mixture`, what `adjust` reads."""
        if self.adjust is None or mixture is None:
            return x + delta * self.weight
        return x + delta * (self.weight + self.adjust(mixture))


def compute_token_delta(
    x: HiddenStates, context: RecurrenceContext, state: RecurrentState | None
) -> tuple[HiddenStates, tuple[ConvState, ...]]:
    """The vector before each token's, less its own; and the window that remembers the last."""
    previous, window = token_shift(x, context, None if state is None else state.windows[0])
    return previous - x, () if window is None else (window,)


def init_rwkv_state(batch: int, heads: int, head_dim: int, embed: int, dtype: Any) -> RecurrentState:
    """A memory before the first token."""
    return RecurrentState(
        jnp.zeros((batch, heads, head_dim, head_dim), jnp.float32), (init_token_shift(batch, embed, dtype),)
    )
