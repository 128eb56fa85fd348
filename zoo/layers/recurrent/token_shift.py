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
    """Token shift x + (previous - x) * weight: interpolation between a token's vector and the previous one (RWKV: Peng
    et al., arXiv:2305.13048, section 3.1). With `adjust`, the weight is data-dependent: weight + adjust(mixture), the
    DDLerp of RWKV-6 (arXiv:2404.05892, section 4.1)."""

    weight: Float[Array, "embed"]
    adjust: AbstractLinear | None

    def __init__(self, embed: int, *, adjust: AbstractLinear | None = None):
        """Initialize weights to 0.5."""
        self.weight = jnp.full(embed, 0.5, jnp.float32)
        self.adjust = adjust

    def __call__(self, x: HiddenStates, delta: HiddenStates, mixture: HiddenStates | None = None) -> HiddenStates:
        """`delta`: previous vector minus current one. `mixture`: input of `adjust`."""
        if self.adjust is None or mixture is None:
            return x + delta * self.weight
        return x + delta * (self.weight + self.adjust(mixture))


def compute_token_delta(
    x: HiddenStates, context: RecurrenceContext, state: RecurrentState | None
) -> tuple[HiddenStates, tuple[ConvState, ...]]:
    """Return previous - x of each token, and the updated token-shift state, if there is one."""
    shift_state = None if state is None else state.conv_states[0]
    previous, shift_state = token_shift(x, context, shift_state)
    if shift_state is None:
        return previous - x, ()
    return previous - x, (shift_state,)


def init_rwkv_state(
    batch: int, heads: int, head_dim: int, embed: int, dtype: Any, value_dim: int | None = None
) -> RecurrentState:
    """Return the empty state of RWKV-6 and RWKV-7 time mixing. `value_dim` is `head_dim` by default."""
    matrix = jnp.zeros((batch, heads, head_dim, value_dim or head_dim), jnp.float32)
    return RecurrentState(matrix, (init_token_shift(batch, embed, dtype),))
