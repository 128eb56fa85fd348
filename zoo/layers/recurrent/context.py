"""How the tokens of one call follow one another, as a recurrence sees it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.ops.recurrence.chunks import RecurrenceMode
from zoo.shapes import HiddenStates

from ..token_info import TokenInfo


class RecurrenceContext(NamedTuple):
    """Whether tokens go on from a state, where segments begin, and which of them are padding.

    Without a state a row may hold several segments, and padding is one of them: nothing goes over its border. With a
    state they follow those that it has seen, and it does not notice tokens at negative positions, as no cache shows
    them: they write nothing, and nothing decays by them. Such padding stands before a row's real tokens.
    """

    mode: RecurrenceMode
    segment_ids: Int[Array, "batch seq"] | None
    token_mask: Bool[Array, "batch seq"] | None
    """None where all tokens are."""

    @classmethod
    def from_info(
        cls, x: HiddenStates, info: TokenInfo, state: Any, mode: RecurrenceMode = "chunked"
    ) -> "RecurrenceContext":
        """One token is a single step of the recurrence, whatever the `form`."""
        mode = "recurrent" if x.shape[1] == 1 else mode
        if state is None:
            return cls(mode, info.segment_ids, None)
        return cls(mode, None, None if info.positions is None else info.positions >= 0)

    def mask_padding(
        self, x: Float[Array, "batch seq *dims"], fill: float | int = 0
    ) -> Float[Array, "batch seq *dims"]:
        """Zero, or what is said `instead`, for padding that the state shall not notice: of keys, steps and log decays
        zero is nothing at all."""
        if self.token_mask is None:
            return x
        return jnp.where(self.token_mask.reshape(*self.token_mask.shape, *(1,) * (x.ndim - 2)), x, fill)
