"""Affine maps of recurrent states, from which the shards of a sequence compute their initial states.

A range of tokens takes any state S before it to

    S' = F S + O

where factor F and offset O, the state after the range from an empty one, do not depend on S. A range followed by a
later one is the map (F_2 F_1, F_2 O_1 + O_2). A shard computes its map and derives the state before its first token
from the maps of earlier shards. Nothing else is communicated: a map is as large as a state and its factor, whatever the
number of tokens.

A recurrence that takes an `IncomingState` as its `state` works on a sharded sequence. Only the recurrence knows the
types of the state and the map: any class with the methods of `AffineMap` works.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@runtime_checkable
class AffineMap(Protocol):
    """The map that a range of tokens applies to the state before it; a pytree of arrays, batch first."""

    @property
    def offset(self) -> Any:
        """The state after the range from an empty state, whose arrays are all zeros."""

    def then(self, later: Any) -> Any:
        """Return the map of this range followed by a later one. Associative."""
        ...

    def reset(self, fresh: Bool[Array, "batch"]) -> Any:
        """Return the map that forgets the state before the range in rows where `fresh`."""
        ...


IncomingState = Callable[[Any], Any]
"""Takes the `AffineMap` of a shard's tokens and returns the state before the first of them: zeros where that begins a
segment."""


class DiagonalAffineMap(NamedTuple):
    """S' = factor * S + offset, elementwise."""

    factor: Float[Array, "batch *dims"]
    """Decay over the range, which broadcasts to the state; 0 where a segment starts after the first token."""
    offset: Float[Array, "batch *dims"]

    def apply(self, state: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the state after the range."""
        return self.factor * state + self.offset

    def then(self, later: "DiagonalAffineMap") -> "DiagonalAffineMap":
        """Return the map of this range followed by a later one."""
        return DiagonalAffineMap(later.factor * self.factor, later.apply(self.offset))

    def reset(self, fresh: Bool[Array, "batch"]) -> "DiagonalAffineMap":
        """Return the map that forgets the state before the range in rows where `fresh`."""
        return self._replace(factor=mask_rows(self.factor, fresh))


class DenseAffineMap(NamedTuple):
    """S' = factor @ S + offset, with the full precision of float32: products of factors grow as the sequence does."""

    factor: Float[Array, "batch heads key_dim key_dim"]
    """0 where a segment starts after the first token."""
    offset: Float[Array, "batch heads key_dim value_dim"]

    def apply(self, state: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the state after the range."""
        return _matmul(self.factor, state) + self.offset

    def then(self, later: "DenseAffineMap") -> "DenseAffineMap":
        """Return the map of this range followed by a later one."""
        return DenseAffineMap(_matmul(later.factor, self.factor), later.apply(self.offset))

    def reset(self, fresh: Bool[Array, "batch"]) -> "DenseAffineMap":
        """Return the map that forgets the state before the range in rows where `fresh`."""
        return self._replace(factor=mask_rows(self.factor, fresh))


def mask_rows(x: Float[Array, "batch *dims"], fresh: Bool[Array, "batch"]) -> Float[Array, "batch *dims"]:
    """Return zeros in rows where `fresh`."""
    return jnp.where(fresh.reshape(-1, *(1,) * (x.ndim - 1)), 0, x)


def _matmul(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision="highest")
