"""Layers in few repeating patterns, stacked: a scan compiles each pattern once, a plain loop every layer."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from zoo.layers import TokenInfo
from zoo.parallel import (
    Dim,
    Module,
    Remat,
    gather,
    implementation_option,
    rematerialize,
    replace_option,
    scan,
    shard_offset,
    stacked,
    vary,
)
from zoo.parallel.tokens import find_token_axes

from .decoder import (
    AbstractBlock,
    AbstractStack,
    Hidden,
    LayerStates,
    RoutingDetail,
    UnrolledStack,
    set_dropout_keys,
)
from .loop import MIN_PLAIN_SIZE, Loop, check_loop, find_drawback, select_loop

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
    """A pattern of blocks, stacked over its repeats: every array has a leading dim `layers`, or `ends`."""

    blocks: tuple[AbstractBlock, ...] = stacked("layers")
    num_repeats: int = eqx.field(static=True)
    """Repeats of the pattern over all devices. Static, so that a tree without arrays has it too."""
    layers: Dim = eqx.field(static=True, default=Dim("layers"))
    """Dim of the repeats: `layers`, which a mesh shards over `pipe`, or `ends`, which it replicates."""

    @property
    def local_repeats(self) -> int:
        """Repeats of the pattern on this device."""
        return jax.tree.leaves(self.blocks)[0].shape[0]

    @property
    def first_repeat(self) -> int | Int[Array, ""]:
        """Number of the first repeat on this device."""
        return shard_offset(jax.tree.leaves(self.blocks)[0], self.layers.name, self.local_repeats)

    def vary_arrays(self) -> tuple[AbstractBlock, ...]:
        """Return the arrays of the blocks. With sequence parallelism the gradients of those that `tensor` replicates,
        such as norms, are parts of a sum: cast here, they are all-reduced once, after the loop over layers."""
        return vary(eqx.filter(self.blocks, eqx.is_array), find_token_axes())


class Stack(AbstractStack):
    """Layers as segments, each a `lax.scan`, so that compile time grows with the patterns and not with the depth; on a
    CPU a plain loop where that is faster. `loop` chooses, and changes neither parameters nor results.

    A layer's number is derived from its place, never stored: a checkpoint loads under any split into segments. A
    block's parameters are all-gathered inside the loop, and rematerialized in the backward pass as `remat` says.
    """

    segments: tuple[Segment, ...]

    remat: Remat = implementation_option()
    loop: Loop = implementation_option()
    routing: RoutingDetail = implementation_option(default="rows")

    def __init__(
        self, factories: Sequence[BlockFactory], *, remat: Remat = "none", loop: Loop = "auto", key: Key[Array, ""]
    ):
        """Build one layer per factory. Every layer has its own PRNG key, so that parameters do not depend on the split
        into segments. **Raises** `ValueError` for an unknown `loop`."""
        keys, segments, start = jax.random.split(key, len(factories)), [], 0
        patterns = find_patterns(factories)
        longest = max(range(len(patterns)), key=lambda i: math.prod(patterns[i]), default=0)
        for number, (period, repeats) in enumerate(patterns):
            segment_keys = keys[start : start + period * repeats].reshape(repeats, period)
            blocks = [eqx.filter_vmap(factories[start + i])(segment_keys[:, i]) for i in range(period)]
            segments.append(Segment(tuple(blocks), repeats, Dim("layers" if number == longest else "ends")))
            start += period * repeats
        self.segments = tuple(segments)
        self.remat = remat
        self.loop = check_loop(loop)

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
        return UnrolledStack(tuple(self.iter_blocks()), self.routing)

    def count_layers(self) -> int:
        """Return the number of layers on this device."""
        return sum(segment.local_repeats * len(segment.blocks) for segment in self.segments)

    def __call__(
        self, hidden: Hidden, info: TokenInfo, states: LayerStates | None = None
    ) -> tuple[Hidden, LayerStates | None]:
        loop = select_loop(self.loop, layers=self.count_layers(), remat=self.remat, size=hidden.x.size)
        first, new_states = 0, ()
        for segment in self.segments:
            start, layers = len(new_states), segment.local_repeats * len(segment.blocks)
            segment_states = None if states is None else states[start : start + layers]
            if loop == "plain":
                hidden, segment_states = self._run_plain(segment, first, hidden, info, segment_states)
            else:
                unroll = 1 if loop == "scan" else min(int(loop), segment.local_repeats)
                hidden, segment_states = self._scan(segment, first, unroll, hidden, info, segment_states)
            new_states += () if segment_states is None else segment_states
            first += segment.num_repeats * len(segment.blocks)
        return hidden, None if states is None else new_states

    def _run_plain(
        self, segment: Segment, first: int, hidden: Hidden, info: TokenInfo, states: LayerStates | None
    ) -> tuple[Hidden, LayerStates | None]:
        """Run the repeats of a pattern, whose first layer is number `first`, one after the other."""
        arrays, period = segment.vary_arrays(), len(segment.blocks)
        offset = first + period * segment.first_repeat
        pattern, new_states = self._make_pattern(segment, info, prevent_cse=True), []
        for blocks in _unstack_tree(arrays):
            for block, run in zip(blocks, pattern, strict=True):
                layer = len(new_states)
                state = None if states is None else states[layer]
                output, state = run(block, offset + layer, Hidden(hidden.x), state)
                hidden = Hidden(output.x, (*hidden.routing, *output.routing))
                new_states.append(state)
        return hidden, None if states is None else tuple(new_states)

    def _scan(
        self, segment: Segment, first: int, unroll: int, hidden: Hidden, info: TokenInfo, states: LayerStates | None
    ) -> tuple[Hidden, LayerStates | None]:
        """Scan over the repeats of a pattern, whose first layer is number `first`."""
        arrays, period, repeats = segment.vary_arrays(), len(segment.blocks), segment.local_repeats
        numbers = first + period * (jnp.arange(repeats) + segment.first_repeat)
        stacked_states = None if states is None else tuple(_stack_trees(states[i::period]) for i in range(period))
        pattern = self._make_pattern(segment, info, prevent_cse=1 < repeats <= unroll)  # then no loop remains

        def step(x: Array, xs: Any):
            arrays, number, states = xs
            new_states, routing = [], []
            for i, run in enumerate(pattern):
                hidden, state = run(arrays[i], number + i, Hidden(x), None if states is None else states[i])
                x = hidden.x
                new_states.append(state)
                routing.append(hidden.routing)
            return x, (None if states is None else tuple(new_states), tuple(routing))

        x, (new_states, routing) = scan(step, hidden.x, (arrays, numbers, stacked_states), unroll=unroll)
        order = [(i % period, i // period) for i in range(period * repeats)]
        routing = [decision for i, repeat in order for decision in _index_tree(routing[i], repeat)]
        hidden = Hidden(x, (*hidden.routing, *routing))
        return hidden, None if new_states is None else tuple(_index_tree(new_states[i], repeat) for i, repeat in order)

    def _make_pattern(self, segment: Segment, info: TokenInfo, *, prevent_cse: bool) -> list[Callable]:
        """Return a function `(arrays, number, hidden, state) -> (hidden, state)` for each block of a pattern."""
        static = eqx.filter(segment.blocks, eqx.is_array, inverse=True)

        def run_block(i: int, arrays: Any, number: int | Int[Array, ""], hidden: Hidden, state: Any):
            layer_info = info.fold_keys(number)
            block = set_dropout_keys(gather(eqx.combine(arrays, static[i])), layer_info)
            hidden, state = block(hidden, layer_info, state)
            return hidden.sum_decisions(info, self.routing), state

        blocks = [partial(run_block, i) for i in range(len(segment.blocks))]
        return [rematerialize(run, self.remat, prevent_cse=prevent_cse) for run in blocks]


def _index_tree(tree: Any, i: int) -> Any:
    """Return element `i` along the leading dim of every array."""
    return jax.tree.map(lambda x: x[i] if eqx.is_array(x) else x, tree)


def _stack_trees(trees: Sequence[Any]) -> Any:
    """Stack the arrays of equal trees along a new leading dim."""
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _unstack_tree(tree: Any) -> list[Any]:
    """Take every array apart along its leading dim. The gradient stacks once, where that of indexing would pad and add
    once per element."""
    arrays, treedef = jax.tree.flatten(tree)
    return [jax.tree.unflatten(treedef, elements) for elements in zip(*map(jax.lax.unstack, arrays), strict=True)]


def set_loop(model: Any, loop: Loop) -> Any:
    """Return `model` with another loop over its layers: "scan", "plain", "auto", or the number of repeats of a pattern
    per iteration of a scan. Parameters and results stay the same.

    **Raises** `ValueError` for anything else, and if the model's layers are not in a `Stack`.
    """

    def replace(stack: AbstractStack) -> AbstractStack:
        if not isinstance(stack, Stack):
            raise ValueError(f"{type(stack).__name__} has no choice of its loop: swap in a Stack before")
        return replace_option(stack, "loop", check_loop(loop))

    return swap_stack(model, replace)


def set_routing(model: Any, routing: RoutingDetail) -> Any:
    """Return `model` with "rows" or "tokens" in `Hidden.routing`: sums over the tokens of each row, or also every
    token's router logits and experts, which take layers x tokens x experts of memory. Results stay the same.

    **Raises** `ValueError` for anything else, and if the model's layers are not in a stack of this library.
    """
    if routing not in get_args(RoutingDetail):
        raise ValueError(f"routing is one of {', '.join(get_args(RoutingDetail))}, not {routing!r}")

    def replace(stack: AbstractStack) -> AbstractStack:
        if not isinstance(stack, Stack | UnrolledStack):
            raise ValueError(f"{type(stack).__name__} has no choice of its routing decisions: swap in a Stack before")
        return replace_option(stack, "routing", routing)

    return swap_stack(model, replace)


def describe_loop(stack: Stack) -> str:
    """Describe the loop over layers on the platform that is compiled for: "plain", or "scan" and why `"auto"` takes
    it."""
    if stack.loop != "auto":
        return f"scan, {stack.loop} repeats per iteration" if isinstance(stack.loop, int) else stack.loop
    drawback = find_drawback(stack.count_layers(), stack.remat)
    return f"scan ({drawback})" if drawback else f"plain (scan under {MIN_PLAIN_SIZE:,} elements of the hidden states)"


def swap_stack(model: Any, make: Callable[[Any], AbstractStack]) -> Any:
    """Return `model` with `make(stack)` in place of its stack. **Raises** `ValueError` unless it has one stack."""
    stacks = [x for x in jax.tree.leaves(model, is_leaf=is_stack) if is_stack(x)]
    if len(stacks) != 1:
        raise ValueError(f"{type(model).__name__} has {len(stacks)} stacks of layers, where one was expected")
    return jax.tree.map(lambda x: make(x) if is_stack(x) else x, model, is_leaf=is_stack)


def is_stack(x: Any) -> bool:
    """Return True if `x` is a stack of layers."""
    return isinstance(x, AbstractStack)
