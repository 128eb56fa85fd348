"""KV caches for decoding.

A cache is a ring buffer of slots. Each slot stores the position of its token, -1 while it is empty or holds padding, so
that the attention mask follows from positions alone, with any padding and after the ring has wrapped around.

Where the layout shards `slots`, as `context` does, each device holds a block of them: 1/n of the memory. A cache is the
same global array on any mesh, so that one that was filled on one mesh may be continued on another. Blocks are filled in
order: memory is shared from the beginning, and the work of blockwise attention, which passes empty slots over, evenly
only once the cache is full.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zoo.parallel import Module, all_gather, current_mesh, num_shards, shard_offset, vary
from zoo.shapes import KVHeads, Positions

from .token_info import TokenInfo, refuse_segments

_ValueHeads = Float[Array, "batch seq kv_heads value_dim"]


class KeyValueCache(Module):
    """KV cache of attention: keys and values of every KV head.

    Slots are next to last, the layout that the attention matmuls need: otherwise the whole cache would be transposed
    for every token.
    """

    key: Float[Array, "batch kv_heads slots head_dim"]
    value: Float[Array, "batch kv_heads slots value_dim"]
    positions: Int[Array, "batch slots"]
    written: Int[Array, ""]

    length: int = eqx.field(static=True)
    """Maximum sequence length; with a sliding window the cache has fewer slots."""

    @classmethod
    def empty(
        cls,
        batch: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: Any,
        length: int,
        value_dim: int | None = None,
    ) -> "KeyValueCache":
        """Return a cache of `slots` slots, rounded up to a multiple of the devices that share them. `value_dim` is
        `head_dim` by default."""
        slots, axes = _local_slots(slots)
        sizes = head_dim, head_dim if value_dim is None else value_dim
        key, value = (jnp.zeros((batch, kv_heads, slots, size), dtype) for size in sizes)
        key, value, positions = vary((key, value, jnp.full((batch, slots), -1)), axes)
        return cls(key, value, positions, jnp.int32(0), length)

    def write(self, key: KVHeads, value: _ValueHeads, positions: Positions) -> "KeyValueCache":
        """Append new tokens; if there are more than slots, keep the last ones. Shards of tokens are all-gathered."""
        key, value, positions = (all_gather(x, "seq", axis=1) for x in (key, value, positions))
        return type(self)(
            _write_slots(self.key, key.swapaxes(1, 2), self.written, 2),
            _write_slots(self.value, value.swapaxes(1, 2), self.written, 2),
            _write_slots(self.positions, positions, self.written, 1),
            self.written + positions.shape[1],
            self.length,
        )

    def read(self) -> tuple[KVHeads, _ValueHeads, Positions]:
        """Return keys, values and positions of the slots of this device, slots along seq."""
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
        """Return a cache of `length` slots, rounded up to a multiple of the devices that share them."""
        slots, axes = _local_slots(length)
        rows, positions = vary((jnp.zeros((batch, slots, features), dtype), jnp.full((batch, slots), -1)), axes)
        return cls(rows, positions, jnp.int32(0), length)

    def write(self, features: Float[Array, "batch seq features"], positions: Positions) -> "LatentCache":
        """Append new tokens; if there are more than slots, keep the last ones. Shards of tokens are all-gathered."""
        features, positions = (all_gather(x, "seq", axis=1) for x in (features, positions))
        return type(self)(
            _write_slots(self.features, features, self.written, 1),
            _write_slots(self.positions, positions, self.written, 1),
            self.written + positions.shape[1],
            self.length,
        )


class IndexedLatentCache(Module):
    """Cache of sparse latent attention: latents, and the keys of the indexer in a cache of their own. A layer without
    an indexer has none of these."""

    latents: LatentCache
    index_keys: LatentCache | None

    @property
    def length(self) -> int:
        """Maximum sequence length."""
        return self.latents.length


def require_positions(info: TokenInfo, state: Any) -> None:
    """**Raises** `ValueError` for a cache or recurrent state without positions, or with segment ids."""
    refuse_segments(info, state)
    if state is not None and info.positions is None:
        raise ValueError("with a cache the place of each token is not known: give positions, -1 for padding")


def _local_slots(slots: int) -> tuple[int, tuple[str, ...]]:
    """Return the number of slots on this device, and the mesh axes that shard them."""
    mesh = current_mesh()
    axes = () if mesh is None else mesh.axes("slots")
    return (-(-slots // lax.axis_size(axes)), axes) if axes else (slots, ())


def _write_slots(ring: Array, new: Array, written: Int[Array, ""], axis: int) -> Array:
    """Write new slots along `axis` of a ring buffer, after the `written` ones before; if there are more than slots,
    keep the last ones. A device that shares the slots writes those that are its own."""
    local, shards = ring.shape[axis], num_shards(ring, "slots")
    slots, seq = local * shards, new.shape[axis]
    indices = (written + jnp.arange(seq)[-slots:]) % slots
    new = lax.slice_in_dim(new, max(seq - slots, 0), seq, axis=axis).astype(ring.dtype)
    if shards > 1:
        indices = indices - shard_offset(ring, "slots", local)
        is_local = (indices >= 0) & (indices < local)
        if seq == 1:  # a slice in place: the others write what they have
            indices = jnp.clip(indices, 0, local - 1)
            new = jnp.where(is_local, new, lax.dynamic_slice_in_dim(ring, indices[0], 1, axis))
        else:
            indices = jnp.where(is_local, indices, local)  # out of range, and dropped
    if seq == 1:
        cpu, default = _scatter_slot_twice(axis), _update_slot_slice(axis)
        return lax.platform_dependent(ring, new, indices, cpu=cpu, default=default)
    return _scatter_slots(axis)(ring, new, indices)


def _scatter_slots(axis: int) -> Callable:
    """Scatter new slots to any indices of a ring buffer; an index out of range is dropped."""
    return lambda ring, new, indices: ring.at[(slice(None),) * axis + (indices,)].set(new, mode="drop")


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
