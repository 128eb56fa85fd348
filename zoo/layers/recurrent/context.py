"""Implementation, segments and padding mask of a recurrence."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.ops.implementations import AUTO
from zoo.shapes import HiddenStates, PaddingMask, SegmentIds

from ..token_info import TokenInfo


class RecurrenceContext(NamedTuple):
    """Implementation, segment ids and padding mask of one call of a recurrent mixer.

    Without a state, a row may hold several packed segments, and padding is one of them: the state is reset at segment
    boundaries. With a state, all tokens continue it, and padding (negative positions, to the left of a row's real
    tokens) is masked: it writes nothing to the state and does not decay it.
    """

    implementation: str
    segment_ids: SegmentIds | None
    token_mask: PaddingMask | None
    """True for real tokens, False for padding; None without padding."""

    @classmethod
    def from_info(
        cls, x: HiddenStates, info: TokenInfo, state: Any, implementation: str = "auto"
    ) -> "RecurrenceContext":
        """Build the context of `x`. A single token always takes one step: it leaves the choice to `"auto"`."""
        implementation = AUTO if x.shape[1] == 1 else implementation
        if state is None:
            return cls(implementation, info.segment_ids, None)
        return cls(implementation, None, None if info.positions is None else info.positions >= 0)

    def mask_padding(
        self, x: Float[Array, "batch seq *dims"], fill: float | int = 0
    ) -> Float[Array, "batch seq *dims"]:
        """Overwrite padded positions with `fill` so that they leave the state unchanged: a zero key writes nothing, a
        zero log decay keeps everything."""
        if self.token_mask is None:
            return x
        return jnp.where(self.token_mask.reshape(*self.token_mask.shape, *(1,) * (x.ndim - 2)), x, fill)
