"""Layers in few repeating patterns, stacked: a scan compiles each pattern once, a plain loop every layer."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Key

from zoo._checks import wrap_key
from zoo.layers import TokenInfo
from zoo.layers.kv_cache import check_room
from zoo.layers.moe.routing import RoutingSums
from zoo.parallel import Module, Remat, current_mesh, gather, implementation_option, scan
from zoo.parallel.pipeline import run_stages
from zoo.parallel.remat import check_remat, rematerialize
from zoo.parallel.scope import has_value
from zoo.parallel.taps import current_taps, in_layer, refuse_layer_taps, slice_edits

from .decoder import (
    AbstractBlock,
    AbstractStack,
    Hidden,
    LayerStates,
    RoutingDetail,
    SharedBlock,
    UnrolledStack,
    find_shared_modules,
    insert_shared,
    make_shared_block,
    run_block,
)
from .gather_ahead import explain_refusal, scan_segment_ahead
from .loop import MIN_PLAIN_SIZE, Loop, check_loop, find_drawback, nests_patterns, select_loop
from .segment import (
    Segment,
    check_order,
    find_inner_patterns,
    index_tree,
    list_layers,
    make_segments,
    stack_trees,
    unstack_tree,
    vary_arrays,
)

_Model = TypeVar("_Model")
BlockFactory = Callable[[Key[Array, ""]], AbstractBlock]
"""A function `key -> block`. Layers of one factory object are equal in structure, and share a compiled block."""

SharedFactory = Callable[[Key[Array, ""]], Module]
"""A function `key -> module` of a module that several layers call."""


class Stack(AbstractStack):
    """Layers as segments, each a `lax.scan`, so that compile time grows with the patterns and not with the depth; on a
    CPU a plain loop where that is faster. `loop` chooses, and changes neither parameters nor results.

    A layer's number is derived from its place, never stored: a checkpoint loads under any split into segments. A
    block's parameters are all-gathered inside the loop, and rematerialized in the backward pass as `remat` says.

    Several layers may call one module: it is in `shared`, once, and their blocks name it by `SharedModule(number)`. It
    is all-gathered with each block that calls it, and its gradient is the sum over the calls. Layers that are one block
    are `SharedBlock(number)`, as `order` makes them.
    """

    segments: tuple[Segment, ...]
    shared: tuple[Module, ...]
    """Modules that several layers call."""

    remat: Remat = implementation_option()
    loop: Loop = implementation_option()
    routing: RoutingDetail = implementation_option(default="rows")

    def __init__(
        self,
        factories: Sequence[BlockFactory],
        *,
        order: Sequence[int] | None = None,
        shared: Sequence[SharedFactory] = (),
        remat: Remat = "none",
        loop: Loop = "auto",
        key: Key[Array, ""],
    ):
        """Build one layer per factory, and one of the modules that layers share per factory of `shared`. Every layer
        has its own PRNG key, so that parameters do not depend on the split into segments.

        `order` runs some of the layers several times (recurrent depth; Universal Transformers, arXiv:1807.03819):
        `(0, 1, 2, 1, 2, 3)` runs the second and the third factory's twice. Such a layer is in `shared`, behind the
        others. Each run counts as a layer: it has a number, dropout and a state of its own. Parameters do not depend on
        how often a layer runs.

        **Raises** `ValueError` for an unknown `remat` or `loop`, for a block that calls a shared module that is not
        there, and for an `order` that leaves out a factory or names one that is not there.
        """
        self.remat = check_remat(remat)
        self.loop = check_loop(loop)
        key = wrap_key(key)
        keys = jax.random.split(key, len(factories))
        order = check_order(order, len(factories))
        repeated = [number for number, runs in sorted(collections.Counter(order).items()) if runs > 1]
        stand_ins = {number: partial(make_shared_block, len(shared) + i) for i, number in enumerate(repeated)}
        makers = [stand_ins.get(number, factories[number]) for number in order]

        def stack(layers: range) -> AbstractBlock:
            numbers = jnp.array(order[layers.start : layers.stop : layers.step])
            return eqx.filter_vmap(makers[layers[0]])(keys[numbers])

        self.segments = make_segments(makers, stack)
        # fold_in(key, i) is the key of layer i
        made = [make(jax.random.fold_in(key, len(factories) + i)) for i, make in enumerate(shared)]
        self.shared = (*made, *(factories[number](keys[number]) for number in repeated))
        if missing := [x.number for x in find_shared_modules(self.segments) if x.number >= len(self.shared)]:
            raise ValueError(f"a layer calls the shared module {missing[0]}, and there are {len(self.shared)}")

    def iter_blocks(self) -> Iterator[AbstractBlock]:
        """Yield the block of each layer, indexed out of its segment, with the modules that it shares. **Raises**
        `NotImplementedError` where the layers are stages of a pipeline, on other devices."""
        return (insert_shared(block, self.shared) for block in self._index_blocks())

    def _index_blocks(self) -> Iterator[AbstractBlock]:
        for segment in self.segments:
            if segment.is_pipelined:
                raise NotImplementedError(
                    "layers one by one, for decoding or for the hidden states of each, are not on one device where "
                    "`pipe` shards them: place the model on a mesh with pipe=1"
                )
            merged = segment.merge_rounds()
            for i in range(merged.local_repeats):
                yield from (index_tree(block, i) for block in merged.blocks)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> LayerStates:
        # Of gathered parameters: a state has all of embed (token shift), which parameters shard at rest (ZeRO-3).
        return tuple(gather(block).init_state(batch, length, dtype) for block in self.iter_blocks())

    def unstack(self) -> UnrolledStack:
        """Return the same layers as a plain loop, for decoding."""
        return UnrolledStack(tuple(self._index_blocks()), self.shared, self.routing)

    def count_layers(self) -> int:
        """Return the number of layers on this device."""
        return sum(segment.rounds * segment.local_repeats * len(segment.blocks) for segment in self.segments)

    def __call__(
        self, hidden: Hidden, info: TokenInfo, states: LayerStates | None = None
    ) -> tuple[Hidden, LayerStates | None]:
        self._check_shared()
        check_room(states, info.positions)  # a scan traces the layers, and they cannot read the number of tokens
        first = 0
        new_states = ()
        for segment in self.segments:
            layers = segment.num_repeats * len(segment.blocks)
            if segment.is_pipelined:
                self._check_pipelined(segment, states)
                hidden = self._run_stages(segment, first, hidden, info)
                segment_states = None
            else:
                if states is None:
                    segment_states = None
                else:
                    segment_states = states[first : first + layers]
                local = segment.merge_rounds()
                run = self._choose_loop(local, hidden)
                hidden, segment_states = run(local, first, hidden, info, segment_states)
            new_states += () if segment_states is None else segment_states
            first += layers
        return hidden, None if states is None else new_states

    def _check_shared(self) -> None:
        """**Raises** `NotImplementedError` for shared modules on a mesh with a pipeline: their gradient would be a sum
        over the stages."""
        mesh = current_mesh()
        if self.shared and mesh is not None and mesh.shape["pipe"] > 1:
            names = ", ".join(dict.fromkeys(type(module).__name__ for module in self.shared))
            raise NotImplementedError(
                f"several layers share {names}, and a pipeline has them on different devices: use a mesh with pipe=1"
            )

    def _check_pipelined(self, segment: Segment, states: LayerStates | None) -> None:
        """**Raises** `NotImplementedError` for features that a pipeline does not support, `ValueError` for layers that
        are not dealt out in the rounds of the layout."""
        if states is not None:
            raise NotImplementedError(
                "states of layers (KV caches, recurrent states) are not kept by the stages of a pipeline: generate on "
                "a mesh with pipe=1"
            )
        refuse_layer_taps("values do not travel through the stages of a pipeline: capture on a mesh with pipe=1")
        if self.routing != "rows":
            raise NotImplementedError(
                f"routing={self.routing!r} has the decisions for every token, which do not travel through a pipeline: "
                'use zoo.configure(model, routing="rows"), or a mesh with pipe=1'
            )
        mesh, is_cut = current_mesh(), len(segment.layers) > 1 and segment.rounds == 1  # to the round that 1F1B runs
        if mesh is not None and not is_cut and mesh.layout.rounds != segment.rounds:
            raise ValueError(
                f"the layout has rounds={mesh.layout.rounds}, and the layers of this model are dealt out in "
                f"{segment.rounds}: place it by zoo.place(model, mesh), and make the optimizer's state from the result"
            )

    def _run_stages(self, segment: Segment, first: int, hidden: Hidden, info: TokenInfo) -> Hidden:
        """Run a pattern whose repeats are dealt out to the stages of a pipeline, and whose first layer is `first`.

        **Raises** `NotImplementedError` for hidden states with more than the residual stream: stages pass on only the
        residual stream.
        """
        if type(hidden) is not Hidden:
            raise NotImplementedError(
                f"{type(hidden).__name__} has layer inputs and keys of earlier layers, which do not travel through a "
                "pipeline: use a mesh with pipe=1"
            )
        local = segment.take_round(jnp.zeros((), int))
        run = self._choose_loop(local, hidden)
        shapes = eqx.filter_eval_shape(lambda hidden: run(local, first, hidden, info, None)[0], Hidden(hidden.x))
        routers, remainder = divmod(len(shapes.routing), local.local_repeats)
        assert not remainder
        per_round = local.local_repeats * lax.axis_size("pipe")

        def run_stage(stream: Any, info: TokenInfo, round_number: Int[Array, ""]) -> Any:
            hidden, sums = stream
            repeat = round_number * per_round + local.first_repeat
            layers = segment.take_round(round_number)
            run = self._choose_loop(layers, hidden)  # by the size of a microbatch
            output, _ = run(layers, first + len(segment.blocks) * repeat, Hidden(hidden.x), info, None)
            write = lambda total, part: lax.dynamic_update_slice_in_dim(total, part, repeat, axis=1)
            sums = jax.tree.map(write, sums, _stack_routing(output.routing, routers))
            return Hidden(output.x, hidden.routing), sums

        # The sums of all routers travel along, and each stage fills in its own sums: rows first, then repeats.
        shapes = jax.eval_shape(lambda routing: _stack_routing(routing, routers), shapes.routing)
        size = segment.num_repeats
        sums = jax.tree.map(lambda x: jnp.zeros((x.shape[0], size, *x.shape[2:]), x.dtype), shapes)
        hidden, sums = run_stages(run_stage, (hidden, sums), info)
        routing = [index_tree(router, (slice(None), i)) for i in range(size) for router in sums]
        return Hidden(hidden.x, (*hidden.routing, *routing))

    def _choose_loop(self, segment: Segment, hidden: Hidden) -> Callable:
        """Return the method that runs the repeats of a pattern on this device: `_run_plain` or `_scan`."""
        loop = select_loop(self.loop, layers=self.count_layers(), remat=self.remat, size=hidden.x.size)
        if type(hidden) is not Hidden and segment.local_repeats == 1:
            loop = "plain"  # a layer may add to the hidden states, and the carry of a scan has one structure
        if loop == "plain":
            return self._run_plain
        if loop == "ahead":
            return self._scan_ahead
        unroll = 1 if loop == "scan" else min(int(loop), segment.local_repeats)
        return partial(self._scan, unroll=unroll)

    def _run_plain(
        self,
        segment: Segment,
        first: int | Int[Array, ""],
        hidden: Hidden,
        info: TokenInfo,
        states: LayerStates | None,
    ) -> tuple[Hidden, LayerStates | None]:
        """Run the repeats of a pattern, whose first layer is number `first`, one after the other."""
        pattern = self._make_pattern(segment, info, prevent_cse=True)
        fill = self._make_fill(segment)
        new_states = []
        for blocks in map(fill, unstack_tree(self._add_edits(segment, first), segment.local_repeats)):
            for block, run in zip(blocks, pattern, strict=True):
                layer = len(new_states)
                state = None if states is None else states[layer]
                number = first + layer
                numbers = (number,) if isinstance(number, int) else ()
                output, state = _run_layer(run, block, number, numbers, hidden.drop_routing(), state)
                hidden = dataclasses.replace(output, routing=(*hidden.routing, *output.routing))
                new_states.append(state)
        return hidden, None if states is None else tuple(new_states)

    def _scan(
        self,
        segment: Segment,
        first: int | Int[Array, ""],
        hidden: Hidden,
        info: TokenInfo,
        states: LayerStates | None,
        *,
        unroll: int,
    ) -> tuple[Hidden, LayerStates | None]:
        """Scan over the repeats of a pattern, whose first layer is number `first`."""
        arrays = self._add_edits(segment, first)
        period = len(segment.blocks)
        repeats = segment.local_repeats
        numbers = first + period * jnp.arange(repeats)
        pattern = self._make_pattern(segment, info, prevent_cse=1 < repeats <= unroll)  # then no loop remains
        fill = self._make_fill(segment)
        blocks = self._fill_blocks(segment)
        if states is None:
            stacked_states = None
        else:
            stacked_states = tuple(stack_trees(states[i::period]) for i in range(period))
        if nests_patterns(self.loop):
            inner_patterns = find_inner_patterns(blocks)
        else:
            inner_patterns = [(1, 1)] * period
        numbers_of_blocks = list_layers(segment, first, inner_patterns)

        def step(hidden: Hidden, xs: Any):
            arrays, number, states = xs
            arrays = fill(arrays)
            outputs = []
            for inner_period, inner_repeats in inner_patterns:
                start = len(outputs)
                layers = slice(start, start + inner_period * inner_repeats)
                inner_states = None if states is None else states[layers]
                inner = [(pattern[i], numbers_of_blocks[i]) for i in range(start, start + inner_period)]
                hidden, new = _run_inner_pattern(inner, arrays[layers], number + start, hidden, inner_states)
                outputs += new
            new_states, routing = zip(*outputs, strict=True)
            return hidden, (None if states is None else new_states, routing)

        inputs = arrays, numbers, stacked_states
        carry = hidden.drop_routing()
        if any(block.extends_hidden for block in blocks):
            carry = _complete_carry(step, carry, inputs)
        output, (new_states, routing) = _scan_layers(step, carry, inputs, unroll=unroll)
        order = [(i % period, i // period) for i in range(period * repeats)]
        routing = [decision for i, repeat in order for decision in index_tree(routing[i], repeat)]
        hidden = dataclasses.replace(output, routing=(*hidden.routing, *routing))
        return hidden, None if new_states is None else tuple(index_tree(new_states[i], repeat) for i, repeat in order)

    def _scan_ahead(
        self,
        segment: Segment,
        first: int | Int[Array, ""],
        hidden: Hidden,
        info: TokenInfo,
        states: LayerStates | None,
    ) -> tuple[Hidden, LayerStates | None]:
        """Scan over the repeats of a pattern, and gather the next block while one runs. A plain scan with states, or
        with values that are read or edited."""
        if states is not None or current_taps() is not None:
            return self._scan(segment, first, hidden, info, states, unroll=1)
        if refusal := explain_refusal(segment.blocks, self.remat, self.shared):
            raise NotImplementedError(refusal)
        return scan_segment_ahead(segment, first, hidden, info, self.routing), None

    def _add_edits(self, segment: Segment, first: int | Int[Array, ""]) -> tuple[tuple[Any, Any], ...]:
        """Return the arrays of each block of a pattern, and its rows of the arrays of edits (`zoo.parallel.taps`)."""
        numbers = list_layers(segment, first, [(1, 1)] * len(segment.blocks))
        edits = [slice_edits(layers, self.find_layers) for layers in numbers]
        return tuple(zip(vary_arrays(segment.blocks), edits, strict=True))

    def find_layers(self, name: str) -> list[int]:
        """Return the numbers of the layers that have a value of this name, such as "attention.query"."""
        return sorted(
            number
            for block, layers in self.iter_stacked()
            if has_value(insert_shared(block, self.shared), name)
            for number in layers
        )

    def iter_stacked(self) -> Iterator[tuple[AbstractBlock, tuple[int, ...]]]:
        """Yield each stacked block, with the numbers of the layers that it stacks."""
        first = 0
        for segment in self.segments:
            yield from zip(segment.blocks, list_layers(segment, first, [(1, 1)] * len(segment.blocks)), strict=True)
            first += segment.num_repeats * len(segment.blocks)

    def _make_pattern(self, segment: Segment, info: TokenInfo, *, prevent_cse: bool) -> list[Callable]:
        """Return a function `(arrays, number, hidden, state) -> (hidden, state)` for each block of a pattern."""
        static = eqx.filter(self._fill_blocks(segment), eqx.is_array, inverse=True)
        shared = eqx.combine(vary_arrays(self.shared), self.shared)

        def gather_and_run(i: int, arrays: Any, number: int | Int[Array, ""], hidden: Hidden, state: Any):
            block = gather(insert_shared(eqx.combine(arrays, static[i]), shared))
            return run_block(block, hidden, info.fold_keys(number), state, self.routing)

        blocks = [partial(gather_and_run, i) for i in range(len(segment.blocks))]
        return [rematerialize(run, self.remat, prevent_cse=prevent_cse) for run in blocks]

    def _fill_blocks(self, segment: Segment) -> tuple[Any, ...]:
        """Return the blocks of a pattern, with the shared one in place of each `SharedBlock`."""
        return tuple(self.shared[block.number] if isinstance(block, SharedBlock) else block for block in segment.blocks)

    def _make_fill(self, segment: Segment) -> Callable:
        """Return a function of the arrays and edits of a pattern's blocks in one repeat, which fills in the arrays of
        shared blocks: they are the same in every repeat."""
        pairs = zip(segment.blocks, self._fill_blocks(segment), strict=True)
        shared = [vary_arrays(block) if isinstance(own, SharedBlock) else None for own, block in pairs]

        def fill(blocks: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
            rows = zip(shared, blocks, strict=True)
            return [(own if arrays is None else arrays, edits) for arrays, (own, edits) in rows]

        return fill


def _run_layer(
    run: Callable,
    arrays: tuple[Any, Any],
    number: int | Int[Array, ""],
    numbers: tuple[int, ...],
    hidden: Hidden,
    state: Any,
) -> tuple[Hidden, Any]:
    """Run a block with its arrays and its rows of edits, as layer `number`, which is one of `numbers`."""
    block_arrays, edits = arrays
    with in_layer(number, numbers, edits):
        return run(block_arrays, number, hidden, state)


def _run_inner_pattern(
    pattern: Sequence[tuple[Callable, tuple[int, ...]]],
    arrays: Sequence[Any],
    first: Int[Array, ""],
    hidden: Hidden,
    states: Sequence[Any] | None,
) -> tuple[Hidden, list[tuple[Any, Any]]]:
    """Run the repeats of a pattern inside a pattern, whose first layer is number `first`: several in a scan of their
    own, which compiles the pattern once. Return the hidden states, and state and routing of each layer. A pattern is a
    function for each of its blocks, with the numbers of the layers that it runs."""
    period = len(pattern)
    states = [None] * len(arrays) if states is None else states

    def step(hidden: Hidden, xs: Any):
        arrays, number, states = xs
        outputs = []
        for i, (run, layers) in enumerate(pattern):
            hidden, state = _run_layer(run, arrays[i], number + i, layers, hidden, states[i])
            outputs.append((state, hidden.routing))
            hidden = hidden.drop_routing()
        return hidden, outputs

    if len(arrays) == period:
        return step(hidden, (arrays, first, states))
    numbers = first + jnp.arange(0, len(arrays), period)
    stacked = [[stack_trees(trees[i::period]) for i in range(period)] for trees in (arrays, states)]
    hidden, outputs = _scan_layers(step, hidden, (stacked[0], numbers, stacked[1]))
    return hidden, [index_tree(outputs[i % period], i // period) for i in range(len(arrays))]


def _scan_layers(step: Callable, hidden: Hidden, xs: Any, *, unroll: int = 1) -> tuple[Hidden, Any]:
    """Scan over layers. The carry is the hidden states without what layers do not change, which they read from outside
    of the loop: carried along, it would be saved once per layer."""
    constants = {name: getattr(hidden, name) for name in hidden.constant_fields}
    nothing = dict.fromkeys(constants)

    def step_carry(carry: Hidden, xs: Any) -> tuple[Hidden, Any]:
        hidden, outputs = step(dataclasses.replace(carry, **constants), xs)
        return dataclasses.replace(hidden, **nothing), outputs

    carry, outputs = scan(step_carry, dataclasses.replace(hidden, **nothing), xs, unroll=unroll)
    return dataclasses.replace(carry, **constants), outputs


def _complete_carry(step: Callable, hidden: Hidden, xs: Any) -> Hidden:
    """Return the initial carry of a scan over blocks that extend the hidden states, with zeros for what they add. The
    first of them writes it before another reads it: a block that reads it first raises while shapes are found."""
    if type(hidden) is not Hidden:
        return hidden
    returned = eqx.filter_eval_shape(lambda hidden: step(hidden, index_tree(xs, 0))[0], hidden)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), returned)
    return dataclasses.replace(zeros, x=hidden.x)


def _stack_routing(routing: Sequence[RoutingSums], routers: int) -> tuple[RoutingSums, ...]:
    """Stack the sums of each router of a pattern over the repeats, along dim 1: rows stay the first."""
    return tuple(stack_trees(routing[i::routers], axis=1) for i in range(routers))


def describe_loop(stack: Stack) -> str:
    """Describe the loop over layers on the platform that is compiled for: "plain", or "scan" and why `"auto"` takes
    it."""
    if stack.loop != "auto":
        if isinstance(stack.loop, int):
            return f"scan, {stack.loop} repeats per iteration"
        return stack.loop
    drawback = find_drawback(stack.count_layers(), stack.remat)
    if drawback:
        return f"scan ({drawback})"
    return f"plain (scan under {MIN_PLAIN_SIZE:,} elements of the hidden states)"


def swap_stack(model: Any, make: Callable[[Any], AbstractStack]) -> Any:
    """Return `model` with `make(stack)` in place of its stack. **Raises** `ValueError` unless it has one stack."""
    stacks = [x for x in jax.tree.leaves(model, is_leaf=is_stack) if is_stack(x)]
    if len(stacks) != 1:
        raise ValueError(f"{type(model).__name__} has {len(stacks)} stacks of layers, where one was expected")
    return jax.tree.map(lambda x: make(x) if is_stack(x) else x, model, is_leaf=is_stack)


def is_stack(x: Any) -> bool:
    """Return True if `x` is a stack of layers."""
    return isinstance(x, AbstractStack)
