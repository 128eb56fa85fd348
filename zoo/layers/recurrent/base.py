"""The base class of recurrences with one matrix per head."""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from zoo.shapes import HeadVectors, HiddenStates, ResidualStream

from ..abstract import AbstractMixer
from ..token_info import TokenInfo
from .common import OutputGate, QKVProjections, RecurrentState
from .context import RecurrenceContext


class AbstractRecurrence(AbstractMixer):
    """A recurrence whose state is one matrix per head: y = readout(recur(x), x). A variant defines `recur`.

    Heads are sharded over `tensor`.
    """

    shards_sequence = True

    projections: eqx.AbstractVar[QKVProjections]
    readout: eqx.AbstractVar[OutputGate]
    implementation: eqx.AbstractVar[str]

    @abc.abstractmethod
    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        """Return the heads of the tokens `x`, and the state after the last token."""

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: RecurrentState | None = None
    ) -> tuple[ResidualStream, RecurrentState | None]:
        context = RecurrenceContext.from_info(x, info, state, self.implementation)
        mixed, new_state = self.recur(x, context)
        y = self.readout(mixed, x)
        if state is None:
            return y, None
        return y, new_state

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> RecurrentState:
        return self.projections.init_state(batch, dtype=dtype)
