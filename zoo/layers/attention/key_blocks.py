"""Blocks of keys in layers of attention: their places in a sequence or a KV cache, and a cache of their keys."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zoo.ops.attention import AttentionMask
from zoo.ops.attention.block_selection import BlockPlaces, place_in_blocks, place_packed_in_blocks, split_into_blocks
from zoo.parallel import Module, all_gather, num_shards, reduce
from zoo.parallel.collectives import shard_offset, sharded_axes
from zoo.shapes import HeadVectors, KVHeads, Positions, ValueHeads

from ..kv_cache import KeyValueCache

BlockKeys = Float[Array, "batch blocks kv_heads _"]
_BlockTokens = Float[Array, "batch blocks size kv_heads _"]
Compress = Callable[[_BlockTokens], Float[Array, "batch blocks kv_heads _"]]
"""A function of the keys, or values, of the tokens of blocks that returns one for each block."""


class BlockCache(Module):
    """KV cache, and one key for each whole block of `size` tokens; also a value if `value` is not None.

    Blocks are counted from position 0 of a row, and positions have no gaps. The key of a block is written with its
    tokens. It is meaningless until the block is whole, and no query may see it before. Where `context` shards the
    slots, every device has the keys of all blocks, 1 / size of the keys of the tokens.
    """

    tokens: KeyValueCache
    key: Float[Array, "batch kv_heads blocks head_dim"]
    value: Float[Array, "batch kv_heads blocks value_dim"] | None

    @classmethod
    def empty(
        cls, batch: int, kv_heads: int, head_dim: int, dtype: Any, length: int, size: int, *, has_values: bool = False
    ) -> "BlockCache":
        """Return a cache for `length` tokens."""
        tokens = KeyValueCache.empty(batch, length, kv_heads, head_dim, dtype, length)
        shape = (batch, kv_heads, -(-length // size), head_dim)
        return cls(tokens, jnp.zeros(shape, dtype), jnp.zeros(shape, dtype) if has_values else None)

    def write(
        self,
        key: KVHeads,
        value: ValueHeads,
        positions: Positions,
        size: int,
        compress_key: Compress,
        compress_value: Compress | None = None,
    ) -> "BlockCache":
        """Append new tokens to each row, and compute the blocks that they fall into from the cached tokens.

        **Raises** `ValueError` for more tokens than the cache holds, where their number can be read.
        """
        tokens = self.tokens.write(key, value, positions)
        new = key.shape[1] * num_shards(key, "seq")
        blocks = self.tokens.written[:, None] // size + jnp.arange((new + size - 2) // size + 1)
        slots = blocks[..., None] * size + jnp.arange(size)

        def update(cached: Array, ring: Array, compress: Compress) -> Array:
            made = compress(_take_slots(ring, slots, tokens))
            rows = jnp.arange(blocks.shape[0])[:, None]
            return cached.at[rows, :, blocks].set(made.astype(cached.dtype), mode="drop")

        block_values = self.value
        if block_values is not None:
            assert compress_value is not None
            block_values = update(block_values, tokens.value, compress_value)
        return dataclasses.replace(
            self, tokens=tokens, key=update(self.key, tokens.key, compress_key), value=block_values
        )


def _take_slots(
    ring: Float[Array, "batch kv_heads slots dim"], slots: Int[Array, "batch blocks size"], cache: KeyValueCache
) -> Float[Array, "batch blocks size kv_heads dim"]:
    """Return the contents of slots of a cache, from the devices that have them."""
    local = ring.shape[2]
    index = slots.reshape(slots.shape[0], 1, -1, 1) - shard_offset(cache.positions, "slots", local)
    is_local = (index >= 0) & (index < local)
    taken = jnp.take_along_axis(ring, jnp.clip(index, 0, local - 1), axis=2)
    taken = reduce(jnp.where(is_local, taken, 0), over="slots")
    return taken.swapaxes(1, 2).reshape(*slots.shape, *taken.shape[1::2])


def split_sequence(
    tokens: tuple[Array, ...], query: HeadVectors, mask: AttentionMask, size: int
) -> tuple[tuple[Array, ...], BlockPlaces, BlockPlaces]:
    """Return the tokens of the blocks of a sequence, the places of its tokens, and those of this device's queries.
    Blocks begin anew in each segment of `mask`, as `zoo.layers.attention.context.gather_keys` returns it."""
    if mask.key_segments is None:
        places = place_in_blocks(jnp.arange(tokens[0].shape[1])[None], size)
        packed = None
    else:
        places = place_packed_in_blocks(mask.key_segments, size)
        packed = places
    blocks = tuple(split_into_blocks(x, size, packed) for x in tokens)
    if not sharded_axes(query, "seq"):
        return blocks, places, places
    seq = query.shape[1]
    start = shard_offset(query, "seq", seq)
    return blocks, places, jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, seq, axis=1), places)


def gather_choosers(
    query: HeadVectors, positions: Positions, cache: KeyValueCache
) -> tuple[Float[Array, "batch _ heads head_dim"], Int[Array, "batch _"]]:
    """Return the queries that choose among the slots of this device, and their positions: all new ones where slots are
    sharded, as `zoo.layers.attention.cached.cached_attention` needs the selection."""
    if not sharded_axes(cache.positions, "slots"):
        return query, positions
    return all_gather(query, "seq", axis=1), all_gather(positions, "seq", axis=1)


def check_sizes(**sizes: int) -> None:
    """**Raises** `ValueError` for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}: expected at least 1")
