"""How the tokens of one call follow one another, as a recurrence sees it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.ops.chunks import Form

from .info import Info


class Course(NamedTuple):
    """Whether tokens go on from a state, where segments begin, and which of them are padding.

    Without a state a row may hold several segments, and padding is one of them: nothing goes over its border. With a
    state they follow those that it has seen, and it does not notice tokens at negative positions, as no cache shows
    them: they write nothing, and nothing decays by them. Such padding stands before a row's real tokens.
    """

    form: Form
    segment_ids: Int[Array, "batch seq"] | None
    real: Bool[Array, "batch seq"] | None
    """None where all tokens are."""

    @classmethod
    def of(cls, x: Float[Array, "batch seq embed"], info: Info, state: Any, form: Form = "chunked") -> "Course":
        """One token is a single step of the recurrence, whatever the `form`."""
        form = "recurrent" if x.shape[1] == 1 else form
        if state is None:
            return cls(form, info.segment_ids, None)
        return cls(form, None, None if info.positions is None else info.positions >= 0)

    def still(self, x: Float[Array, "batch seq *dims"], instead: float | int = 0) -> Float[Array, "batch seq *dims"]:
        """Zero, or what is said `instead`, for padding that the state shall not notice: of keys, steps and log decays
        zero is nothing at all."""
        if self.real is None:
            return x
        return jnp.where(self.real.reshape(*self.real.shape, *(1,) * (x.ndim - 2)), x, instead)
