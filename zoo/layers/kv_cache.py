"""KV caches for decoding.

A cache is a ring buffer of slots for each row. Each slot stores the position of its token, -1 while it is empty. The
attention mask follows from positions only, after the ring has wrapped around too. Each row has its own write pointer,
and padding takes no slot: in a batch of conversations no turn pushes another row's tokens out of a window.

Where the layout shards `slots`, as `context` does, each device holds a block of them: 1/n of the memory. A cache is the
same global array on any mesh, so that one that was filled on one mesh may be continued on another. Blocks are filled in
order: memory is shared from the beginning, and the work of blockwise attention, which passes empty slots over, evenly
only once the cache is full.
"""

import dataclasses
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from zoo._checks import is_host_readable
from zoo.ops.implementations import always_holds
from zoo.parallel import Module, all_gather, num_shards, vary
from zoo.parallel.collectives import current_mesh, shard_offset
from zoo.shapes import KVHeads, Positions

from .token_info import TokenInfo, refuse_segments

_ValueHeads = Float[Array, "batch seq kv_heads value_dim"]
_States = TypeVar("_States")


class KeyValueCache(Module):
    """KV cache of attention: keys and values of every KV head.

    Slots are next to last, the layout that the attention matmuls need: otherwise the whole cache would be transposed
    for every token.
    """

    key: Float[Array, "batch kv_heads slots head_dim"]
    value: Float[Array, "batch kv_heads slots value_dim"]
    positions: Int[Array, "batch slots"]
    written: Int[Array, "batch"]
    """Number of tokens written to each row, without padding."""
    rope_length: Int[Array, ""]
    """Sequence length for RoPE that depends on it: `length`, unless `set_rope_length` has set another."""
    rope_shift: Int[Array, "batch"] | None = None
    """Number to add to the positions of further tokens, after images, for RoPE on several axes; None for RoPE on
    one."""

    length: int = eqx.field(static=True, kw_only=True)
    """Maximum sequence length; with a sliding window the cache has fewer slots."""
    drops_oldest: bool = eqx.field(static=True, kw_only=True, default=False)
    """True for a window or chunk, whose new tokens may overwrite the oldest. Any other cache holds `length` tokens, and
    a row with more is an error or NaN."""

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
        drops_oldest: bool | None = None,
    ) -> "KeyValueCache":
        """Return a cache of `slots` slots, rounded up to a multiple of the devices that share them. `value_dim` is
        `head_dim` by default, and `drops_oldest` is true for fewer slots than `length`."""
        if drops_oldest is None:
            drops_oldest = slots < length
        if value_dim is None:
            value_dim = head_dim
        slots, axes = _local_slots(slots)
        key, value = (jnp.zeros((batch, kv_heads, slots, size), dtype) for size in (head_dim, value_dim))
        key, value, positions = vary((key, value, jnp.full((batch, slots), -1)), axes)
        written = jnp.zeros(batch, jnp.int32)
        return cls(key, value, positions, written, jnp.int32(length), length=length, drops_oldest=drops_oldest)

    def write(self, key: KVHeads, value: _ValueHeads, positions: Positions) -> "KeyValueCache":
        """Append new tokens to each row. Padding, at position -1, takes no slot. If a row has more tokens than there
        are slots, the last ones are kept. Shards of tokens are all-gathered.

        **Raises** `ValueError` for more tokens than the cache holds, where their number can be read.
        """
        key, value, positions = (all_gather(x, "seq", axis=1) for x in (key, value, positions))
        if not self.drops_oldest:
            check_room(self, positions)
        slots, written = _assign_slots(self.positions, self.written, positions)
        return dataclasses.replace(
            self,
            key=_write_heads(self.key, key, slots),
            value=_write_heads(self.value, value, slots),
            positions=_write_rows(self.positions, positions, slots),
            written=written,
        )

    def note_shift(self, info: TokenInfo) -> "KeyValueCache":
        """Return the cache after tokens with these coordinates. Further ones go on from the last: after the larger of
        its row and column if it is of an image."""
        if self.rope_shift is None or info.coordinates is None or info.positions is None:
            return self
        last = info.positions[:, -1]
        shift = info.coordinates[:, -1, 1:].max(-1).astype(jnp.int32) - last
        return dataclasses.replace(self, rope_shift=jnp.where(last < 0, self.rope_shift, shift))

    def shift_positions(self, info: TokenInfo) -> TokenInfo:
        """Return `info` with the positions of RoPE."""
        if self.rope_shift is None or info.coordinates is not None or info.positions is None:
            return info
        shifted = jnp.where(info.positions < 0, -1, info.positions + self.rope_shift[:, None])
        return dataclasses.replace(info, positions=shifted)

    def read(self) -> tuple[KVHeads, _ValueHeads, Positions]:
        """Return keys, values and positions of the slots of this device, slots along seq."""
        return self.key.swapaxes(1, 2), self.value.swapaxes(1, 2), self.positions


class LatentCache(Module):
    """Cache of latent attention: the normalized latent of each token, concatenated with the rotary key that all heads
    share. One array, so that a query is multiplied with both at once.

    Other layers keep other features of each token in it, of all tokens or of the last ones.
    """

    features: Float[Array, "batch slots features"]
    positions: Int[Array, "batch slots"]
    written: Int[Array, "batch"]
    """Number of tokens written to each row, without padding."""
    rope_length: Int[Array, ""]
    """Sequence length for RoPE that depends on it: `length`, unless `set_rope_length` has set another."""

    length: int = eqx.field(static=True)
    """Maximum sequence length. A row with more tokens is an error or NaN."""
    drops_oldest: bool = eqx.field(static=True, kw_only=True, default=False)
    """True for a window, whose new tokens may overwrite the oldest."""

    @classmethod
    def empty(cls, batch: int, features: int, dtype: Any, length: int, *, window: int | None = None) -> "LatentCache":
        """Return a cache of `length` slots, or of a `window` that is not longer, rounded up to a multiple of the
        devices that share them."""
        drops_oldest = window is not None and window <= length
        slots, axes = _local_slots(window if drops_oldest and window is not None else length)
        rows, positions = vary((jnp.zeros((batch, slots, features), dtype), jnp.full((batch, slots), -1)), axes)
        written = jnp.zeros(batch, jnp.int32)
        return cls(rows, positions, written, jnp.int32(length), length, drops_oldest=drops_oldest)

    def write(self, features: Float[Array, "batch seq features"], positions: Positions) -> "LatentCache":
        """Append new tokens to each row. Padding, at position -1, takes no slot. If a row has more tokens than there
        are slots, the last ones are kept. Shards of tokens are all-gathered.

        **Raises** `ValueError` for more tokens than the cache holds, where their number can be read.
        """
        features, positions = (all_gather(x, "seq", axis=1) for x in (features, positions))
        check_room(self, positions)
        slots, written = _assign_slots(self.positions, self.written, positions)
        return dataclasses.replace(
            self,
            features=_write_rows(self.features, features, slots),
            positions=_write_rows(self.positions, positions, slots),
            written=written,
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

    @property
    def rope_length(self) -> Int[Array, ""]:
        """Sequence length for RoPE that depends on it."""
        return self.latents.rope_length


def require_positions(info: TokenInfo, state: Any) -> None:
    """**Raises** `ValueError` for a cache or recurrent state without positions, or with segment ids."""
    refuse_segments(info, state)
    if state is not None and info.positions is None:
        raise ValueError("with a cache the place of each token is not known: give positions, -1 for padding")


def set_rope_length(states: _States, length: int | Int[Array, ""]) -> _States:
    """Return `states` with `length` as the sequence length for RoPE that depends on it: of the tokens that follow. Keys
    in the caches stay as they are."""

    def set_length(x: Any) -> Any:
        if not is_cache(x):
            return x
        return dataclasses.replace(x, rope_length=jnp.asarray(length, jnp.int32))

    return jax.tree.map(set_length, states, is_leaf=is_cache)


def forget(states: _States, positions: Int[Array, "batch"]) -> _States:
    """Return `states` without the tokens at `positions` and after them: the next tokens take their slots.

    A ring that has dropped old tokens for those that it forgets does not get them back: see `add_slots`.
    """

    def cut(x: Any) -> Any:
        if not is_cache(x):
            return x
        kept = jnp.where(x.positions >= positions[:, None], -1, x.positions)
        return dataclasses.replace(x, positions=kept, written=jnp.minimum(x.written, positions))

    return jax.tree.map(cut, states, is_leaf=is_cache)


def add_slots(states: _States, slots: int) -> _States:
    """Return empty caches with `slots` slots more in each ring, so that as many of the latest tokens can be forgotten
    without a gap in its window."""

    def widen(x: Any) -> Any:
        if not is_cache(x) or not x.drops_oldest:
            return x
        more = -(-slots // num_shards(x.positions, "slots"))
        return _pad_slots(x, more)

    return jax.tree.map(widen, states, is_leaf=is_cache)


def drops_oldest(states: Any) -> bool:
    """Return True if some cache in `states` is that of a window, whose new tokens may overwrite the oldest."""
    return any(is_cache(x) and x.drops_oldest for x in jax.tree.leaves(states, is_leaf=is_cache))


def _pad_slots(cache: KeyValueCache | LatentCache, slots: int) -> KeyValueCache | LatentCache:
    def pad(x: Array, axis: int, fill: int) -> Array:
        widths = [(0, slots if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=fill)

    positions = pad(cache.positions, 1, -1)
    if isinstance(cache, LatentCache):
        return dataclasses.replace(cache, features=pad(cache.features, 1, 0), positions=positions)
    return dataclasses.replace(cache, key=pad(cache.key, 2, 0), value=pad(cache.value, 2, 0), positions=positions)


def check_room(states: Any, positions: Positions | None) -> None:
    """Check that the caches in `states` hold new tokens at `positions`, if their numbers can be read.

    **Raises** `ValueError` for a row with more tokens than the length of a cache, unless it is one of a window.
    """
    if positions is None or not is_host_readable(positions):
        return
    new = (np.asarray(jax.device_get(positions)) >= 0).sum(1)
    for cache in jax.tree.leaves(states, is_leaf=is_cache):
        if not is_cache(cache) or cache.drops_oldest:
            continue
        if is_host_readable(cache.written):
            before = np.asarray(jax.device_get(cache.written))
        else:
            before = 0
        if len(overfull := np.flatnonzero(before + new > cache.length)):
            row = int(overfull[0])
            total = int(np.broadcast_to(before + new, new.shape)[row])
            raise ValueError(
                f"row {row} has {total} tokens, {new[row]} of them new, and its cache holds {cache.length}: call "
                "init_state with a larger length"
            )


def mark_overfull(
    mixed: Float[Array, "batch seq heads _"], cache: KeyValueCache | LatentCache
) -> Float[Array, "batch seq heads _"]:
    """Return NaN for the rows with more tokens than `cache` holds: attention to the rest would be windowed."""
    if cache.drops_oldest:
        return mixed
    return jnp.where((cache.written > cache.length)[:, None, None, None], jnp.nan, mixed)


def is_cache(x: Any) -> bool:
    """Return True for a KV cache or a cache of latents."""
    return isinstance(x, KeyValueCache | LatentCache)


def _local_slots(slots: int) -> tuple[int, tuple[str, ...]]:
    """Return the number of slots on this device, and the mesh axes that shard them."""
    mesh = current_mesh()
    if mesh is None or not (axes := mesh.axes("slots")):
        return slots, ()
    return -(-slots // lax.axis_size(axes)), axes


def _assign_slots(
    ring: Int[Array, "batch slots"], written: Int[Array, "batch"], positions: Positions
) -> tuple[Int[Array, "batch seq"], Int[Array, "batch"]]:
    """Return the slot of each new token on this device, and the tokens written to each row after them.

    Padding has a slot out of range, and so have tokens that later ones overwrite or that another device holds.
    """
    local = ring.shape[1]
    shards = num_shards(ring, "slots")
    is_real = positions >= 0
    order = written[:, None] + jnp.cumsum(is_real, axis=1, dtype=jnp.int32) - 1
    written = written + is_real.sum(axis=1, dtype=jnp.int32)
    slots = order % (local * shards)
    is_kept = is_real & (order >= written[:, None] - local * shards)
    if shards > 1:
        slots = slots - shard_offset(ring, "slots", local)
        is_kept &= (slots >= 0) & (slots < local)
    dropped = local + jnp.arange(positions.shape[1], dtype=jnp.int32)  # no two alike: indices are unique
    return jnp.where(is_kept, slots, dropped), written


def _write_rows(
    ring: Shaped[Array, "batch slots *rest"], new: Shaped[Array, "batch seq *rest"], slots: Int[Array, "batch seq"]
) -> Shaped[Array, "batch slots *rest"]:
    """Write the new tokens of each row to their slots; a slot out of range is dropped."""
    new, slots, is_unique = _repeat_single(new.astype(ring.dtype), slots)
    rows = jnp.arange(slots.shape[0])[:, None]
    return ring.at[rows, slots].set(new, mode="drop", unique_indices=is_unique)


def _write_heads(
    ring: Float[Array, "batch kv_heads slots size"],
    new: Float[Array, "batch seq kv_heads size"],
    slots: Int[Array, "batch seq"],
) -> Float[Array, "batch kv_heads slots size"]:
    """Write the keys or values of new tokens to their slots; a slot out of range is dropped."""
    new, slots, is_unique = _repeat_single(new.astype(ring.dtype), slots)
    rows = jnp.arange(slots.shape[0])[:, None]
    return ring.at[rows, :, slots].set(new, mode="drop", unique_indices=is_unique)


def _repeat_single(new: Array, slots: Int[Array, "batch seq"]) -> tuple[Array, Int[Array, "batch _"], bool]:
    """Repeat a single token, which is then written twice; return also whether all slots differ.

    On CPU, XLA turns a scatter of one slot into a slice update and duplicates it for each consumer of the ring buffer,
    which is then copied: with one row, attention took twice as long (jax 0.10).
    """
    if always_holds(lambda: slots.size > 1):
        return new, slots, True
    return jnp.concatenate([new, new], axis=1), jnp.concatenate([slots, slots], axis=1), False
