"""Outputs of several layers of an encoder of images, for as many layers of a language model (DeepStack, Meng et al.,
arXiv:2406.04334)."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from zoo.layers import TokenInfo
from zoo.parallel.fields import wrapped
from zoo.shapes import ResidualStream

from ..decoder import AbstractBlock, Hidden


class DeepstackHidden(Hidden):
    """Hidden states with the outputs of the layers before that are kept."""

    kept: tuple[ResidualStream, ...] = ()
    """In the order of layers; zeros before the first."""


class KeptBlock(AbstractBlock):
    """A block whose output is kept, one of `count` in the model."""

    extends_hidden = True

    block: AbstractBlock = wrapped()

    count: int = eqx.field(static=True)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.block.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        hidden, state = self.block(hidden, info, state)
        if not isinstance(hidden, DeepstackHidden):
            empty = (jnp.zeros_like(hidden.x),) * self.count
            hidden = DeepstackHidden(hidden.x, hidden.routing, hidden.decisions, empty)
        return dataclasses.replace(hidden, kept=(*hidden.kept[1:], hidden.x)), state
