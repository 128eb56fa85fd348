"""What the places of a model may hold. A class is one of these, abstract, or final."""

import abc
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.parallel import Module

from .info import Info


class AbstractLinear(Module):
    """What stands where a matrix is multiplied: a `Linear`, or what an adapter or a quantised form puts there."""

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        """W x + b."""

    @abc.abstractmethod
    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        """Wᵀ x."""

    @property
    @abc.abstractmethod
    def out_size(self) -> int:
        """How many outputs live here: on a device's share, its share."""


class AbstractNorm(Module):
    """A map of vectors that keeps their scale."""

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]: ...


class AbstractFeedForward(Module):
    """A map of each token by itself."""

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]: ...


class AbstractMixer(Module):
    """What lets tokens see those before them: attention, or a recurrence."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch seq embed"], info: Info, state: Any = None
    ) -> tuple[Float[Array, "batch seq embed"], Any]:
        """What each token takes from those it sees; and the state after them, where one came."""

    @abc.abstractmethod
    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        """What it remembers before the first of up to `length` tokens."""
