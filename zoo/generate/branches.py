"""Recurrent states after each of several tokens that are read in one call: a copy per token, of which one is kept.

A KV cache forgets rejected tokens by its write pointer. A recurrent state cannot: where a layer has one, each row is
read as many times as there are tokens, in one batch, up to the first token, the second and so on.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from zoo.layers import TokenInfo
from zoo.layers.attention.compressed import CompressedCache
from zoo.layers.attention.indexed import IndexedCache
from zoo.layers.attention.key_blocks import BlockCache
from zoo.layers.kv_cache import IndexedLatentCache, forget, is_cache
from zoo.models.decoder import AbstractBlock, Hidden
from zoo.parallel import Module
from zoo.parallel.batch import find_batch_axis
from zoo.parallel.module import Leaf, map_leaves

from .prefill import repeat_rows

_Tree = TypeVar("_Tree")


def find_recurrent_state(state: Any) -> str | None:
    """Return the class of the first state that is not a KV cache; None if all are."""
    is_state = lambda x: isinstance(x, Module) and not isinstance(x, IndexedLatentCache | IndexedCache)
    states = jax.tree.leaves(state, is_leaf=is_state)
    recurrent = [x for x in states if not (is_cache(x) or isinstance(x, BlockCache | CompressedCache))]
    return type(recurrent[0]).__name__.lstrip("_") if recurrent else None


class Branches(Module):
    """The states of a layer after each of several tokens: as many rows for each row of the batch."""

    states: Any


class BranchingBlock(AbstractBlock):
    """Runs a block so that its states after every token of a call are returned, as `Branches`."""

    extends_hidden = True

    block: AbstractBlock

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.block.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        positions = info.positions
        assert positions is not None
        count = positions.shape[1]
        # Padding is on the left: the last column of copy j is token j, or the last token of the row if it has fewer.
        number_of_tokens = jnp.maximum((positions >= 0).sum(axis=1), 1)
        last = jnp.minimum(jnp.arange(count), number_of_tokens[:, None] - 1).reshape(-1, 1)
        source = jnp.arange(count) - (count - 1 - last)
        copied = jnp.take_along_axis(jnp.repeat(positions, count, axis=0), jnp.maximum(source, 0), axis=1)
        info = dataclasses.replace(_copy_rows(info, source), positions=jnp.where(source < 0, -1, copied))
        output, states = self.block(_copy_rows(hidden, source), info, repeat_rows(state, count))
        return _take_last(dataclasses.replace(output, decisions=()), count), Branches(states)


def branch_blocks(blocks: tuple[AbstractBlock, ...], states: tuple[Any, ...]) -> tuple[AbstractBlock, ...]:
    """Return the blocks, those with a recurrent state as `BranchingBlock`s."""
    pairs = zip(blocks, states, strict=True)
    return tuple(BranchingBlock(block) if find_recurrent_state(state) else block for block, state in pairs)


def keep(states: _Tree, count: Int[Array, "batch"], positions: Int[Array, "batch"]) -> _Tree:
    """Return the states after the first `count` tokens of a call, at least 1, and without the tokens at `positions` and
    after them."""

    def choose(x: Any) -> Any:
        if isinstance(x, Branches):
            return _take_rows(x.states, count - 1)
        return forget(x, positions)

    return jax.tree.map(choose, states, is_leaf=lambda x: isinstance(x, Branches) or is_cache(x))


def _copy_rows(tree: _Tree, source: Int[Array, "copies seq"]) -> _Tree:
    """Repeat each row for as many copies as tokens, each with the tokens at the places `source` of the row."""

    def copy(leaf: Leaf, x: Array, repeated: Array) -> Array:
        axis = _find_token_axis(leaf, x)
        if axis is None:
            return repeated
        places = jnp.maximum(source, 0).reshape((1,) * (axis - 1) + source.shape + (1,) * (x.ndim - axis - 1))
        return jnp.take_along_axis(repeated, places, axis=axis)

    return map_leaves(copy, tree, repeat_rows(tree, source.shape[1]))


def _take_last(tree: _Tree, copies: int) -> _Tree:
    """Return the last token of each copy as the tokens of its row, and of arrays without tokens the last copy."""

    def take(leaf: Leaf, x: Array) -> Array:
        axis = find_batch_axis(leaf, x)
        if axis is None:
            return x
        split = x.reshape(*x.shape[:axis], -1, copies, *x.shape[axis + 1 :])
        if _find_token_axis(leaf, x) is None:
            return jnp.take(split, copies - 1, axis=axis + 1)
        return jnp.take(split, copies - 1, axis=axis + 2)

    return map_leaves(take, tree)


def _take_rows(tree: _Tree, number: Int[Array, "batch"]) -> _Tree:
    """Return one of the copies of each row, by its number."""

    def take(leaf: Leaf, x: Array) -> Array:
        axis = find_batch_axis(leaf, x)
        if axis is None:
            return x
        copies = x.shape[axis] // len(number)
        return jnp.take(x, jnp.arange(len(number)) * copies + number, axis=axis)

    return map_leaves(take, tree)


def _find_token_axis(leaf: Leaf, x: Array) -> int | None:
    """Return the array axis of the tokens, which follows the rows; None for an array without tokens."""
    axis = find_batch_axis(leaf, x)
    if axis is None or leaf.dims is None or len(leaf.dims) < axis + 2:
        return None
    return axis + 1 if leaf.dims[axis + 1].name in ("seq", "tokens") else None
