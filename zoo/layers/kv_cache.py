"""What attention remembers of the tokens before.

A cache is a ring of slots. Each knows the position of the token it holds, -1 while it is empty or holds padding, so
that what a query sees needs no other bookkeeping, whatever the padding and however often the ring has gone round.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zoo.parallel import Module

from .token_info import TokenInfo

_KVHeads = Float[Array, "batch seq kv_heads head_dim"]


class KeyValueCache(Module):
    """Keys and values of every head.

    Slots lie next to last, where the products of attention want them: kept as they come in, the whole cache would
    be turned round at every token.
    """

    key: Float[Array, "batch kv_heads slots head_dim"]
    value: Float[Array, "batch kv_heads slots head_dim"]
    positions: Int[Array, "batch slots"]
    written: Int[Array, ""]

    length: int = eqx.field(static=True)
    """How many tokens it was made for; with a window there are fewer slots."""

    @classmethod
    def empty(cls, batch: int, slots: int, kv_heads: int, head_dim: int, dtype: Any, length: int) -> "KeyValueCache":
        key, value = (jnp.zeros((batch, kv_heads, slots, head_dim), dtype) for _ in range(2))  # donated one by one
        return cls(key, value, jnp.full((batch, slots), -1), jnp.int32(0), length)

    def write(
        self,
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        positions: Int[Array, "batch seq"],
    ) -> "KeyValueCache":
        """The cache after these tokens; of more than it has slots, it keeps the last."""
        return type(self)(
            _write_slots(self.key, key.swapaxes(1, 2), self.written, 2),
            _write_slots(self.value, value.swapaxes(1, 2), self.written, 2),
            _write_slots(self.positions, positions, self.written, 1),
            self.written + positions.shape[1],
            self.length,
        )

    def read(self) -> tuple[_KVHeads, _KVHeads, Int[Array, "batch seq"]]:
        """Keys, values and positions as `write` takes them, slots along seq."""
        return self.key.swapaxes(1, 2), self.value.swapaxes(1, 2), self.positions


class LatentCache(Module):
    """What latent attention makes all keys and values of: of each token its latent, normed, and behind it the rotary
    key that all heads share. One array, since queries meet both at once."""

    features: Float[Array, "batch slots features"]
    positions: Int[Array, "batch slots"]
    written: Int[Array, ""]

    length: int = eqx.field(static=True)
    """How many tokens it was made for."""

    @classmethod
    def empty(cls, batch: int, features: int, dtype: Any, length: int) -> "LatentCache":
        rows = jnp.zeros((batch, length, features), dtype)
        return cls(rows, jnp.full((batch, length), -1), jnp.int32(0), length)

    def write(self, features: Float[Array, "batch seq features"], positions: Int[Array, "batch seq"]) -> "LatentCache":
        """The cache after these tokens; of more than it has slots, it keeps the last."""
        return type(self)(
            _write_slots(self.features, features, self.written, 1),
            _write_slots(self.positions, positions, self.written, 1),
            self.written + positions.shape[1],
            self.length,
        )


def require_positions(info: TokenInfo, state: Any) -> None:
    """**Raises** `ValueError` for a state without positions."""
    if state is not None and info.positions is None:
        raise ValueError("with a cache the place of each token is not known: give positions, -1 for padding")


def _write_slots(ring: Array, new: Array, written: Int[Array, ""], axis: int) -> Array:
    """A ring of slots along `axis` after these new ones, the next behind so many that were `written`; of more than it
    has slots, it keeps the last."""
    slots, seq = ring.shape[axis], new.shape[axis]
    at = (written + jnp.arange(seq)[-slots:]) % slots
    new = lax.slice_in_dim(new, max(seq - slots, 0), seq, axis=axis).astype(ring.dtype)
    if seq == 1:
        return lax.platform_dependent(ring, new, at, cpu=_scatter_slot_twice(axis), default=_update_slot_slice(axis))
    return _scatter_slots(axis)(ring, new, at)


def _scatter_slots(axis: int) -> Callable:
    """Write slots `at` of a ring, wherever they are."""
    return lambda ring, new, at: ring.at[(slice(None),) * axis + (at,)].set(new)


def _update_slot_slice(axis: int) -> Callable:
    """One slot, which cannot wrap round: a slice, written in place."""
    return lambda ring, new, at: lax.dynamic_update_slice_in_dim(ring, new, at[0], axis=axis)


def _scatter_slot_twice(axis: int) -> Callable:
    """One slot, as if it were two. On a CPU XLA makes a slice of one, and writes it once for each that reads the ring,
    which it therefore copies: where one row or one head lives, attention took twice as long (jax 0.10)."""
    return lambda ring, new, at: _scatter_slots(axis)(
        ring, jnp.concatenate([new, new], axis), jnp.concatenate([at, at])
    )
