"""Layers one after another: cut into few repeating patterns, each compiled once and scanned."""

import abc
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from zoo.layers import AbstractLinear, TokenInfo
from zoo.parallel import Module, Remat, gather, implementation_option, rematerialize, scan, shard_offset, stacked

from .blocks import AbstractBlock, Hidden

BlockFactory = Callable[[Key[Array, ""]], AbstractBlock]
"""A maker of blocks, `key -> block`. Two layers of the same maker are of one kind."""
LayerStates = tuple[Any, ...]
"""One state a layer, each of its own shape."""
_FIRST_LINEAR_SITE = 2**16
"""Of the matrices of a layer: sites below it are those of the layer's own dropout."""


def find_patterns(items: Sequence[Any]) -> list[tuple[int, int]]:
    """Cut a list into repeating patterns, (period, repeats) each, so that as few blocks as possible are compiled.

    `cut("aaaa") == [(1, 4)]`; `cut("lllllgllllllg"[:13])`, five local layers to a global one, gives few segments too.
    The best cut of the first n layers is the best cut of fewer, and one pattern more: dynamic programming.
    """
    if items and all(kind == items[0] for kind in items):
        return [(1, len(items))]
    best: list[tuple[int, int, list[tuple[int, int]]]] = [(0, 0, [])]  # blocks to compile, segments, the cut
    for end in range(1, len(items) + 1):
        options = []
        for period in range(1, end + 1):
            start = end - period
            while start >= 0 and list(items[start : start + period]) == list(items[end - period : end]):
                blocks, segments, before = best[start]
                options.append((blocks + period, segments + 1, [*before, (period, (end - start) // period)]))
                start -= period
        best.append(min(options))
    return best[-1][2]


class AbstractStack(Module):
    """What carries a stream through all layers: `(stream, info, states) -> (stream, states)`.

    A model holds one and calls it once, so that another way of running the layers can stand in its place.
    """

    @abc.abstractmethod
    def __call__(
        self, hidden: Hidden, info: TokenInfo, states: LayerStates | None = None
    ) -> tuple[Hidden, LayerStates | None]:
        """The stream after all layers; and their states after these tokens, where some came."""

    @abc.abstractmethod
    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> LayerStates:
        """Empty states for up to `length` tokens, a tuple with one a layer."""


class Segment(Module):
    """A pattern of blocks, stacked over its repeats: every array has the dim `layers` in front."""

    blocks: tuple[AbstractBlock, ...] = stacked("layers")
    num_repeats: int = eqx.field(static=True)
    """How often the pattern is repeated, on all devices together: known in a tree without its arrays too."""

    @property
    def local_repeats(self) -> int:
        return jax.tree.leaves(self.blocks)[0].shape[0]


class Stack(AbstractStack):
    """Layers as segments, each scanned, so that compile time grows with the patterns and not with the depth.

    A layer's number is derived from its place, never stored: any cut of the layers reads any other's parameters. The
    parameters of a block are gathered inside the scan, and what `remat` says is computed again in the backward pass.
    """

    segments: tuple[Segment, ...]

    remat: Remat = implementation_option()

    def __init__(self, factories: Sequence[BlockFactory], *, remat: Remat = "none", key: Key[Array, ""]):
        """One maker a layer. Every layer has its own key, so that the cut does not change the numbers."""
        keys, segments, start = jax.random.split(key, len(factories)), [], 0
        for period, repeats in find_patterns(factories):
            own = keys[start : start + period * repeats].reshape(repeats, period)
            blocks = [eqx.filter_vmap(factories[start + place])(own[:, place]) for place in range(period)]
            segments.append(Segment(tuple(blocks), repeats))
            start += period * repeats
        self.segments = tuple(segments)
        self.remat = remat

    def iter_blocks(self) -> Iterator[AbstractBlock]:
        """The block of each layer, taken out of its stack."""
        for segment in self.segments:
            for i in range(segment.local_repeats):
                yield from (_index_tree(block, i) for block in segment.blocks)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> LayerStates:
        return tuple(block.init_state(batch, length, dtype) for block in self.iter_blocks())

    def unstack(self) -> "Unstacked":
        """The same layers, one block each: to decode with, where a scan would copy weights and states every step."""
        return Unstacked(tuple(self.iter_blocks()))

    def __call__(
        self, hidden: Hidden, info: TokenInfo, states: LayerStates | None = None
    ) -> tuple[Hidden, LayerStates | None]:
        first, after = 0, []
        for segment in self.segments:
            layers = segment.local_repeats * len(segment.blocks)
            own = None if states is None else states[first : first + layers]
            hidden, own = self.scan_segment(segment, first, hidden, info, own)
            after += () if own is None else own
            first += layers
        return hidden, None if states is None else tuple(after)

    def scan_segment(
        self, segment: Segment, first: int, hidden: Hidden, info: TokenInfo, states: LayerStates | None
    ) -> tuple[Hidden, LayerStates | None]:
        arrays, static = eqx.partition(segment.blocks, eqx.is_array)
        period, repeats = len(segment.blocks), segment.local_repeats
        numbers = first + period * (jnp.arange(repeats) + shard_offset(jax.tree.leaves(arrays)[0], "layers", repeats))
        by_place = None if states is None else tuple(_stack_trees(states[place::period]) for place in range(period))

        def layer(place: int, stream: Hidden, arrays: Any, number: Int[Array, ""], state: Any):
            own = info.fold_keys(number + place)
            return _fold_dropout_keys(gather(eqx.combine(arrays, static[place])), own)(stream, own, state)

        pattern = [rematerialize(partial(layer, place), self.remat) for place in range(period)]

        def repeat(x: Array, now: Any):
            arrays, number, states = now
            after, decided = [], []
            for place, run in enumerate(pattern):
                out, state = run(Hidden(x), arrays[place], number, None if states is None else states[place])
                x = out.x
                after.append(state)
                decided.append(out.routing)
            return x, (None if states is None else tuple(after), tuple(decided))

        x, (after, decided) = scan(repeat, hidden.x, (arrays, numbers, by_place))
        each = [(i % period, i // period) for i in range(period * repeats)]
        routing = [one for place, i in each for one in _index_tree(decided[place], i)]
        hidden = Hidden(x, (*hidden.routing, *routing))
        return hidden, None if after is None else tuple(_index_tree(after[place], i) for place, i in each)


class Unstacked(AbstractStack):
    """Layers one by one, their states too: a token writes one row of each cache, in place where they are donated."""

    blocks: tuple[AbstractBlock, ...]

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> LayerStates:
        return tuple(block.init_state(batch, length, dtype) for block in self.blocks)

    def __call__(
        self, hidden: Hidden, info: TokenInfo, states: LayerStates | None = None
    ) -> tuple[Hidden, LayerStates | None]:
        after = []
        for number, block in enumerate(self.blocks):
            state = None if states is None else states[number]
            own = info.fold_keys(number)
            hidden, state = _fold_dropout_keys(gather(block), own)(hidden, own, state)
            after.append(state)
        return hidden, None if states is None else tuple(after)


def _fold_dropout_keys(block: AbstractBlock, info: TokenInfo) -> AbstractBlock:
    """The block with a layer's random keys in what of its matrices drops values: that of adapters."""
    if info.keys is None:
        return block
    sites = itertools.count(_FIRST_LINEAR_SITE)
    is_matrix = lambda node: isinstance(node, AbstractLinear)
    one = lambda node: node.with_dropout_keys(info, next(sites)) if is_matrix(node) else node
    return jax.tree.map(one, block, is_leaf=is_matrix)


def _index_tree(tree: Any, i: int) -> Any:
    """Element `i` along the first dim of every array."""
    return jax.tree.map(lambda x: x[i] if eqx.is_array(x) else x, tree)


def _stack_trees(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def swap_stack(model: Any, make: Callable[[Any], AbstractStack]) -> Any:
    """`model` with `make(stack)` in place of its stack. **Raises** `ValueError` where it has none, or several."""
    found = [x for x in jax.tree.leaves(model, is_leaf=is_stack) if is_stack(x)]
    if len(found) != 1:
        raise ValueError(f"{type(model).__name__} has {len(found)} stacks of layers, where one was expected")
    return jax.tree.map(lambda x: make(x) if is_stack(x) else x, model, is_leaf=is_stack)


def is_stack(x: Any) -> bool:
    return isinstance(x, AbstractStack)
