"""The choice of an implementation of a recurrence: what all recurrences have in common."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array

from ..implementations import Implementation, Operation


@dataclasses.dataclass(frozen=True)
class RecurrenceRequest:
    """Facts of a call, which the choice of an implementation depends on."""

    batch: int
    seq: int
    dtype: Any
    heads: int = 1
    groups: int = 1
    """Heads of queries and keys."""
    key_dim: int = 1
    value_dim: int = 1
    decay: Literal["none", "head", "channel"] = "none"
    """Log decays of a token: none, one per head, or one per key channel."""
    has_bonus: bool = False
    steps: int = 1
    """Writes per token: more than one in DeltaProduct."""
    has_incoming_state: bool = False
    """True if the state is an `IncomingState`: the tokens are a shard of a sequence."""
    has_segments: bool = False

    @classmethod
    def from_heads(
        cls,
        query: Array,
        value: Array,
        log_decay: Array | None,
        *,
        has_bonus: bool = False,
        steps: int = 1,
        state: Any = None,
        segment_ids: Array | None = None,
    ) -> "RecurrenceRequest":
        """Describe a recurrence with a matrix state per head, of arrays [batch, seq, heads, dim]."""
        decay = "channel"
        if log_decay is None:
            decay = "none"
        elif log_decay.ndim == 3:
            decay = "head"
        return cls(
            batch=query.shape[0],
            seq=query.shape[1],
            dtype=jnp.result_type(query, value),
            heads=value.shape[2],
            groups=query.shape[2],
            key_dim=query.shape[3],
            value_dim=value.shape[3],
            decay=decay,
            has_bonus=has_bonus,
            steps=steps,
            has_incoming_state=callable(state),
            has_segments=segment_ids is not None,
        )

    @classmethod
    def from_channels(cls, x: Array, state: Any = None) -> "RecurrenceRequest":
        """Describe an elementwise recurrence, of arrays [batch, seq, channels]."""
        return cls(batch=x.shape[0], seq=x.shape[1], dtype=x.dtype, has_incoming_state=callable(state))


def make_recurrence(
    name: str, recurrent: Callable, chunked: Callable, *others: Implementation[RecurrenceRequest]
) -> Operation[RecurrenceRequest]:
    """Make the table of implementations of a recurrence. `"auto"` tries `others` in order, skipping any with a
    drawback, then takes "chunked" ("recurrent" for a single token)."""
    return Operation(
        name,
        (
            *others,
            Implementation("chunked", chunked, find_drawback=_find_chunked_drawback),
            Implementation("recurrent", recurrent, find_sharding_obstacle, _find_recurrent_drawback),
        ),
        kind="recurrence",
    )


def find_sharding_obstacle(request: RecurrenceRequest) -> str | None:
    """Return why an implementation that needs its initial state at once cannot compute a request, or None."""
    if not request.has_incoming_state:
        return None
    return "the sequence is sharded, and it cannot compute the affine map of its tokens before their initial state"


def _find_chunked_drawback(request: RecurrenceRequest) -> str | None:
    if request.seq == 1:
        return "a single token is not a chunk"
    return None


def _find_recurrent_drawback(request: RecurrenceRequest) -> str | None:
    if request.seq == 1:
        return None
    return "it takes one token after the other: the reference, and the decode step"
