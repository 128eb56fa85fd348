"""The loop over layers as a scan over few repeating patterns, each compiled once."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from zoo.layers import TokenInfo
from zoo.parallel import Module, Remat, gather, implementation_option, rematerialize, scan, shard_offset, stacked

from .decoder import AbstractBlock, AbstractStack, Hidden, LayerStates, UnrolledStack, set_dropout_keys

BlockFactory = Callable[[Key[Array, ""]], AbstractBlock]
"""A function `key -> block`. Layers of one factory object are equal in structure, and share a compiled block."""


def find_patterns(items: Sequence[Any]) -> list[tuple[int, int]]:
    """Split a sequence into repeating patterns `(period, repeats)` so that as few items as possible are compiled.

    `find_patterns("aaaa") == [(1, 4)]`; `find_patterns("lllllg" * 10 + "ll") == [(6, 10), (1, 2)]`, five local layers
    per global one. Dynamic programming: the best split of the first n items is the best split of fewer, and one pattern
    more.
    """
    if items and all(item == items[0] for item in items):
        return [(1, len(items))]
    best: list[tuple[int, int, list[tuple[int, int]]]] = [(0, 0, [])]  # items to compile, segments, the split
    for end in range(1, len(items) + 1):
        options = []
        for period in range(1, end + 1):
            start = end - period
            while start >= 0 and list(items[start : start + period]) == list(items[end - period : end]):
                compiled, segments, before = best[start]
                options.append((compiled + period, segments + 1, [*before, (period, (end - start) // period)]))
                start -= period
        best.append(min(options))
    return best[-1][2]


class Segment(Module):
    """A pattern of blocks, stacked over its repeats: every array has a leading dim `layers`."""

    blocks: tuple[AbstractBlock, ...] = stacked("layers")
    num_repeats: int = eqx.field(static=True)
    """Repeats of the pattern over all devices. Static, so that a tree without arrays has it too."""

    @property
    def local_repeats(self) -> int:
        """Repeats of the pattern on this device."""
        return jax.tree.leaves(self.blocks)[0].shape[0]


class Stack(AbstractStack):
    """Layers as segments, each a `lax.scan`, so that compile time grows with the patterns and not with the depth.

    A layer's number is derived from its place, never stored: a checkpoint loads under any split into segments. A
    block's parameters are all-gathered inside the scan, and rematerialized in the backward pass as `remat` says.
    """

    segments: tuple[Segment, ...]

    remat: Remat = implementation_option()

    def __init__(self, factories: Sequence[BlockFactory], *, remat: Remat = "none", key: Key[Array, ""]):
        """Build one layer per factory. Every layer has its own PRNG key, so that parameters do not depend on the split
        into segments."""
        keys, segments, start = jax.random.split(key, len(factories)), [], 0
        for period, repeats in find_patterns(factories):
            segment_keys = keys[start : start + period * repeats].reshape(repeats, period)
            blocks = [eqx.filter_vmap(factories[start + i])(segment_keys[:, i]) for i in range(period)]
            segments.append(Segment(tuple(blocks), repeats))
            start += period * repeats
        self.segments = tuple(segments)
        self.remat = remat

    def iter_blocks(self) -> Iterator[AbstractBlock]:
        """Yield the block of each layer, indexed out of its segment."""
        for segment in self.segments:
            for i in range(segment.local_repeats):
                yield from (_index_tree(block, i) for block in segment.blocks)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> LayerStates:
        # Of gathered parameters: a state has all of embed (token shift), which parameters shard at rest (ZeRO-3).
        return tuple(gather(block).init_state(batch, length, dtype) for block in self.iter_blocks())

    def unstack(self) -> UnrolledStack:
        """Return the same layers as a plain loop, for decoding."""
        return UnrolledStack(tuple(self.iter_blocks()))

    def __call__(
        self, hidden: Hidden, info: TokenInfo, states: LayerStates | None = None
    ) -> tuple[Hidden, LayerStates | None]:
        first, new_states = 0, []
        for segment in self.segments:
            layers = segment.local_repeats * len(segment.blocks)
            segment_states = None if states is None else states[first : first + layers]
            hidden, segment_states = self._scan_segment(segment, first, hidden, info, segment_states)
            new_states += () if segment_states is None else segment_states
            first += layers
        return hidden, None if states is None else tuple(new_states)

    def _scan_segment(
        self, segment: Segment, first: int, hidden: Hidden, info: TokenInfo, states: LayerStates | None
    ) -> tuple[Hidden, LayerStates | None]:
        """Scan over the repeats of a pattern, whose first layer is number `first`."""
        arrays, static = eqx.partition(segment.blocks, eqx.is_array)
        period, repeats = len(segment.blocks), segment.local_repeats
        numbers = first + period * (jnp.arange(repeats) + shard_offset(jax.tree.leaves(arrays)[0], "layers", repeats))
        stacked_states = None if states is None else tuple(_stack_trees(states[i::period]) for i in range(period))

        def run_block(i: int, hidden: Hidden, arrays: Any, number: Int[Array, ""], state: Any):
            layer_info = info.fold_keys(number + i)
            return set_dropout_keys(gather(eqx.combine(arrays, static[i])), layer_info)(hidden, layer_info, state)

        pattern = [rematerialize(partial(run_block, i), self.remat) for i in range(period)]

        def step(x: Array, xs: Any):
            arrays, number, states = xs
            new_states, routing = [], []
            for i, run in enumerate(pattern):
                hidden, state = run(Hidden(x), arrays[i], number, None if states is None else states[i])
                x = hidden.x
                new_states.append(state)
                routing.append(hidden.routing)
            return x, (None if states is None else tuple(new_states), tuple(routing))

        x, (new_states, routing) = scan(step, hidden.x, (arrays, numbers, stacked_states))
        order = [(i % period, i // period) for i in range(period * repeats)]
        routing = [decision for i, repeat in order for decision in _index_tree(routing[i], repeat)]
        hidden = Hidden(x, (*hidden.routing, *routing))
        return hidden, None if new_states is None else tuple(_index_tree(new_states[i], repeat) for i, repeat in order)


def _index_tree(tree: Any, i: int) -> Any:
    """Return element `i` along the leading dim of every array."""
    return jax.tree.map(lambda x: x[i] if eqx.is_array(x) else x, tree)


def _stack_trees(trees: Sequence[Any]) -> Any:
    """Stack the arrays of equal trees along a new leading dim."""
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def swap_stack(model: Any, make: Callable[[Any], AbstractStack]) -> Any:
    """Return `model` with `make(stack)` in place of its stack. **Raises** `ValueError` unless it has one stack."""
    stacks = [x for x in jax.tree.leaves(model, is_leaf=is_stack) if is_stack(x)]
    if len(stacks) != 1:
        raise ValueError(f"{type(model).__name__} has {len(stacks)} stacks of layers, where one was expected")
    return jax.tree.map(lambda x: make(x) if is_stack(x) else x, model, is_leaf=is_stack)


def is_stack(x: Any) -> bool:
    """Return True if `x` is a stack of layers."""
    return isinstance(x, AbstractStack)
