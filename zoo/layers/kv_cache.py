"""KV caches for decoding.

A cache is a ring buffer of slots. Each slot stores the position of its token, -1 while it is empty or holds padding, so
that the attention mask follows from positions alone, with any padding and after the ring has wrapped around.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zoo.parallel import Module, sharded_axes
from zoo.shapes import KVHeads, Positions

from .token_info import TokenInfo


class KeyValueCache(Module):
    """KV cache of attention: keys and values of every KV head.

    Slots are next to last, the layout that the attention matmuls need: otherwise the whole cache would be transposed
    for every token.
    """

    key: Float[Array, "batch kv_heads slots head_dim"]
    value: Float[Array, "batch kv_heads slots head_dim"]
    positions: Int[Array, "batch slots"]
    written: Int[Array, ""]

    length: int = eqx.field(static=True)
    """Maximum sequence length; with a sliding window the cache has fewer slots."""

    @classmethod
    def empty(cls, batch: int, slots: int, kv_heads: int, head_dim: int, dtype: Any, length: int) -> "KeyValueCache":
        key, value = (jnp.zeros((batch, kv_heads, slots, head_dim), dtype) for _ in range(2))  # donated separately
        return cls(key, value, jnp.full((batch, slots), -1), jnp.int32(0), length)

    def write(self, key: KVHeads, value: KVHeads, positions: Positions) -> "KeyValueCache":
        """Append new tokens; if there are more than slots, keep the last ones."""
        return type(self)(
            _write_slots(self.key, key.swapaxes(1, 2), self.written, 2),
            _write_slots(self.value, value.swapaxes(1, 2), self.written, 2),
            _write_slots(self.positions, positions, self.written, 1),
            self.written + positions.shape[1],
            self.length,
        )

    def read(self) -> tuple[KVHeads, KVHeads, Positions]:
        """Return keys, values and positions of all slots, slots along seq."""
        return self.key.swapaxes(1, 2), self.value.swapaxes(1, 2), self.positions


class LatentCache(Module):
    """Cache of latent attention: the normalized latent of each token, concatenated with the rotary key that all heads
    share. One array, so that a query is multiplied with both at once."""

    features: Float[Array, "batch slots features"]
    positions: Int[Array, "batch slots"]
    written: Int[Array, ""]

    length: int = eqx.field(static=True)
    """Maximum sequence length."""

    @classmethod
    def empty(cls, batch: int, features: int, dtype: Any, length: int) -> "LatentCache":
        rows = jnp.zeros((batch, length, features), dtype)
        return cls(rows, jnp.full((batch, length), -1), jnp.int32(0), length)

    def write(self, features: Float[Array, "batch seq features"], positions: Positions) -> "LatentCache":
        """Append new tokens; if there are more than slots, keep the last ones."""
        return type(self)(
            _write_slots(self.features, features, self.written, 1),
            _write_slots(self.positions, positions, self.written, 1),
            self.written + positions.shape[1],
            self.length,
        )


def require_positions(info: TokenInfo, state: Any) -> None:
    """**Raises** `ValueError` for a cache or recurrent state without positions, or for a sharded sequence."""
    if state is not None and info.positions is None:
        raise ValueError("with a cache the place of each token is not known: give positions, -1 for padding")
    if state is not None and info.positions is not None and (axes := sharded_axes(info.positions, "seq")):
        raise ValueError(f"a cache holds all tokens of a row, and {' x '.join(axes)} shards them: decode on other axes")


def _write_slots(ring: Array, new: Array, written: Int[Array, ""], axis: int) -> Array:
    """Write new slots along `axis` of a ring buffer, after the `written` ones before; if there are more than slots,
    keep the last ones."""
    slots, seq = ring.shape[axis], new.shape[axis]
    indices = (written + jnp.arange(seq)[-slots:]) % slots
    new = lax.slice_in_dim(new, max(seq - slots, 0), seq, axis=axis).astype(ring.dtype)
    if seq == 1:
        cpu, default = _scatter_slot_twice(axis), _update_slot_slice(axis)
        return lax.platform_dependent(ring, new, indices, cpu=cpu, default=default)
    return _scatter_slots(axis)(ring, new, indices)


def _scatter_slots(axis: int) -> Callable:
    """Scatter new slots to any indices of a ring buffer."""
    return lambda ring, new, indices: ring.at[(slice(None),) * axis + (indices,)].set(new)


def _update_slot_slice(axis: int) -> Callable:
    """Write one slot, which cannot wrap around, as an in-place slice update."""
    return lambda ring, new, indices: lax.dynamic_update_slice_in_dim(ring, new, indices[0], axis=axis)


def _scatter_slot_twice(axis: int) -> Callable:
    """Write one slot as a scatter of two equal ones.

    On CPU, XLA turns a scatter of one slot into a slice update and duplicates it for each consumer of the ring buffer,
    which is then copied: with one row or one head per device, attention took twice as long (jax 0.10).
    """
    return lambda ring, new, indices: _scatter_slots(axis)(
        ring, jnp.concatenate([new, new], axis), jnp.concatenate([indices, indices])
    )
