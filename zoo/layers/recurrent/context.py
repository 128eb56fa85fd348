"""Implementation, segments and padding mask of a recurrence, and the state before its first token."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from zoo.ops.implementations import AUTO
from zoo.ops.recurrence.affine import AffineMap, mask_rows
from zoo.parallel.collectives import sharded_axes
from zoo.parallel.sequence import exclusive_prefix, halo
from zoo.shapes import HiddenStates, PaddingMask, SegmentIds

from ..token_info import TokenInfo, refuse_segments


class RecurrenceContext(NamedTuple):
    """Implementation, segment ids and padding mask of one call of a recurrent mixer.

    Without a state, a row may hold several packed segments, and padding is one of them: the state is reset at segment
    boundaries. With a state, all tokens continue it, and padding (negative positions, to the left of a row's real
    tokens) is masked: it writes nothing to the state and does not decay it. Elsewhere in a row it gives NaN in mixers
    with a convolution or a token shift.

    Where the sequence is sharded, the first token of a shard continues the last of the shard before.
    """

    implementation: str
    segment_ids: SegmentIds | None
    token_mask: PaddingMask | None
    """True for real tokens, False for padding; None without padding."""
    fresh: Bool[Array, "batch"]
    """True where the first token on this device begins a row or a segment, so that nothing before it counts."""
    axes: tuple[str, ...] = ()
    """Mesh axes that shard the sequence."""
    info: TokenInfo = TokenInfo()
    state: Any = None
    """The recurrent state that the tokens continue; None without one."""

    @classmethod
    def from_info(
        cls, x: HiddenStates, info: TokenInfo, state: Any, implementation: str = "auto"
    ) -> "RecurrenceContext":
        """Build the context of `x`. A single token always takes one step: it leaves the choice to `"auto"`.

        **Raises** `NotImplementedError` for a state where the sequence is sharded.
        """
        if x.shape[1] == 1:
            implementation = AUTO
        axes = sharded_axes(x, "seq")
        refuse_segments(info, state)
        if state is None:
            fresh = _find_fresh_rows(x, info.segment_ids, axes)
            return cls(implementation, info.segment_ids, None, fresh, axes, info)
        if axes:
            raise NotImplementedError(
                f"a recurrent state continues a sequence with all of its new tokens, and {' x '.join(axes)} shards "
                "them: call the mixer by zoo.layers.abstract.run_mixer, which gathers them"
            )
        token_mask = None if info.positions is None else info.positions >= 0
        return cls(implementation, None, token_mask, jnp.zeros(x.shape[0], bool), info=info, state=state)

    def mask_padding(
        self, x: Float[Array, "batch seq *dims"], fill: float | int = 0
    ) -> Float[Array, "batch seq *dims"]:
        """Overwrite padded positions with `fill` so that they leave the state unchanged: a zero key writes nothing, a
        zero log decay keeps everything."""
        if self.token_mask is None:
            return x
        return jnp.where(self.token_mask.reshape(*self.token_mask.shape, *(1,) * (x.ndim - 2)), x, fill)

    def initial_state(self, state: Any) -> Any:
        """Return the `state` argument of a recurrence: the state, None without one, or where the sequence is sharded
        `incoming_state`."""
        if self.axes:
            return self.incoming_state
        return state

    def options(self) -> dict[str, Any]:
        """Return the options `state`, `segment_ids` and `implementation` of a recurrence that continues the matrices of
        a `RecurrentState`."""
        matrix = None if self.state is None else self.state.matrix
        return {
            "state": self.initial_state(matrix),
            "segment_ids": self.segment_ids,
            "implementation": self.implementation,
        }

    def incoming_state(self, affine_map: AffineMap) -> Any:
        """Return the state before the first token of this shard, given the map of its tokens: that after all earlier
        shards, and zeros where `fresh`. An `IncomingState` of `zoo.ops.recurrence.affine`."""
        earlier = exclusive_prefix(
            affine_map.reset(self.fresh), lambda earlier, later: earlier.then(later), self.axes
        ).offset
        return jax.tree.map(lambda x: mask_rows(x, self.fresh), earlier)


def _find_fresh_rows(x: HiddenStates, segment_ids: SegmentIds | None, axes: tuple[str, ...]) -> Bool[Array, "batch"]:
    """Return True where the first token on this device begins a row or a segment."""
    if not axes:
        return jnp.ones(x.shape[0], bool)
    is_first_shard = jnp.full(x.shape[0], lax.axis_index(axes) == 0)
    if segment_ids is None:
        return is_first_shard
    return is_first_shard | (halo(segment_ids, 1, axes)[:, 0] != segment_ids[:, 0])
