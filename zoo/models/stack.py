"""Layers in few repeating patterns, stacked, and run pattern by pattern in one of four ways (`zoo.models.runners`)."""

import collections
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from zoo._checks import wrap_key
from zoo.layers import TokenInfo
from zoo.layers.kv_cache import check_room
from zoo.parallel import Module, gather, implementation_option
from zoo.parallel.remat import Remat, check_remat, rematerialize
from zoo.parallel.scope import has_value
from zoo.parallel.taps import taps_layers

from .decoder import (
    AbstractBlock,
    AbstractStack,
    Hidden,
    LayerStates,
    RoutingDetail,
    UnrolledStack,
    find_shared_modules,
    insert_shared,
    make_shared_block,
    run_block,
)
from .loop import MIN_PLAIN_SIZE, Loop, check_loop, find_drawback, select_loop
from .runners import LayerNumber, RunLayer, Runner
from .runners.ahead import explain_refusal, run_ahead
from .runners.plain import run_plain
from .runners.scan import run_scan
from .runners.stages import check_stages, run_stages
from .segment import Segment, check_order, index_tree, make_segments, vary_arrays

_Model = TypeVar("_Model")
BlockFactory = Callable[[Key[Array, ""]], AbstractBlock]
"""A function `key -> block`. Layers of one factory object are equal in structure, and share a compiled block."""

SharedFactory = Callable[..., Module]
"""A function `key= -> module` of a module that several layers call."""


class Stack(AbstractStack):
    """Layers as segments, each a `lax.scan`, so that compile time grows with the patterns and not with the depth; on a
    CPU a plain loop where that is faster. `loop` chooses, and changes neither parameters nor results. Layers
    whose values are read or edited run in the plain loop.

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
        `(0, 1, 2, 1, 2, 3)` runs the second and the third factory's twice. Such a layer is in `shared`, after the
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
        made = [make(key=jax.random.fold_in(key, len(factories) + i)) for i, make in enumerate(shared)]
        self.shared = (*made, *(factories[number](keys[number]) for number in repeated))
        if missing := [x.number for x in find_shared_modules(self.segments) if x.number >= len(self.shared)]:
            raise ValueError(f"a layer calls the shared module {missing[0]}, and there are {len(self.shared)}")

    def __call__(
        self, hidden: Hidden, info: TokenInfo, states: LayerStates | None = None
    ) -> tuple[Hidden, LayerStates | None]:
        if states is not None:  # a scan traces the layers, and they cannot read the number of tokens
            check_room(states, info.positions)
        new_states = []
        for segment, first, own in self._iter_segments(states):
            run = self._choose_runner(segment, hidden, own)
            hidden, own = run(segment, first, hidden, info, own)
            new_states += own
        return hidden, None if states is None else tuple(new_states)

    def _iter_segments(self, states: LayerStates | None = None) -> Iterator[tuple[Segment, int, LayerStates]]:
        """Yield each segment, the number of its first layer, and the states of its layers: None for each without."""
        first = 0
        for segment in self.segments:
            end = first + segment.num_repeats * len(segment.blocks)
            own = (None,) * (end - first) if states is None else states[first:end]
            yield segment.merge_unless_pipelined(), first, own
            first = end

    def _choose_runner(self, segment: Segment, hidden: Hidden, states: LayerStates) -> Runner:
        """Return the runner of a segment. **Raises** `NotImplementedError` for what it cannot do."""
        if not segment.is_pipelined:
            return self._choose_local_runner(segment, hidden, states)
        check_stages(segment, hidden, states, self.shared, self.routing)
        return partial(run_stages, choose=self._choose_local_runner)

    def _choose_local_runner(self, segment: Segment, hidden: Hidden, states: LayerStates) -> Runner:
        """Return the runner of layers that are on this device."""
        repeats = segment.local_repeats
        loop = select_loop(self.loop, layers=self.count_layers(), remat=self.remat, size=hidden.x.size)
        if taps_layers():
            loop = "plain"  # a value of a layer is then a value of the program
        if type(hidden) is not Hidden and repeats == 1:
            loop = "plain"  # a layer may add to the hidden states, and the carry of a scan has one structure
        if loop == "plain":
            return partial(run_plain, bind=partial(self._bind, prevent_cse=True), find_layers=self.find_layers)
        if loop == "ahead" and all(state is None for state in states):
            if refusal := explain_refusal(segment.blocks, self.remat, self.shared):
                raise NotImplementedError(refusal)
            return partial(run_ahead, routing=self.routing)
        unroll = min(loop, repeats) if isinstance(loop, int) else 1
        # Without a loop around it, or with another block before it, a block would be recomputed before it is needed.
        bind = partial(self._bind, prevent_cse=len(segment.blocks) > 1 or 1 < repeats <= unroll)
        return partial(run_scan, bind=bind, unroll=unroll)

    def _bind(self, segment: Segment, info: TokenInfo, *, prevent_cse: bool) -> list[RunLayer]:
        """Return for each block of a pattern the function that runs it as a layer of this stack."""
        shared = eqx.combine(vary_arrays(self.shared), self.shared)
        return [self._bind_block(block, shared, info, prevent_cse) for block in segment.blocks]

    def _bind_block(
        self, block: AbstractBlock, shared: tuple[Module, ...], info: TokenInfo, prevent_cse: bool
    ) -> RunLayer:
        static = eqx.filter(block, eqx.is_array, inverse=True)

        def gather_and_run(arrays: Any, number: LayerNumber, hidden: Hidden, state: Any) -> tuple[Hidden, Any]:
            block = gather(insert_shared(eqx.combine(arrays, static), shared))
            return run_block(block, hidden, info.fold_keys(number), state, self.routing)

        return rematerialize(gather_and_run, self.remat, prevent_cse=prevent_cse)

    def count_layers(self) -> int:
        """Return the number of layers on this device."""
        return sum(segment.num_local_layers for segment in self.segments)

    def iter_blocks(self) -> Iterator[AbstractBlock]:
        """Yield the block of each layer, indexed out of its segment, with the modules that it shares. **Raises**
        `NotImplementedError` where the layers are stages of a pipeline, on other devices."""
        return (insert_shared(block, self.shared) for block in self._index_blocks())

    def _index_blocks(self) -> Iterator[AbstractBlock]:
        for segment, _, _ in self._iter_segments():
            if segment.is_pipelined:
                raise NotImplementedError(
                    "layers one by one, for decoding or for the hidden states of each, are not on one device where "
                    "`pipe` shards them: place the model on a mesh with pipe=1"
                )
            for i in range(segment.local_repeats):
                yield from (index_tree(block, i) for block in segment.blocks)

    def iter_stacked(self) -> Iterator[tuple[AbstractBlock, tuple[int, ...]]]:
        """Yield each stacked block, with the numbers of the layers that it stacks."""
        first = 0
        for segment in self.segments:
            period = len(segment.blocks)
            end = first + period * segment.num_repeats
            for i, block in enumerate(segment.blocks):
                yield block, tuple(range(first + i, end, period))
            first = end

    def find_layers(self, name: str) -> list[int]:
        """Return the numbers of the layers that have a value of this name, such as "attention.query"."""
        return sorted(
            number
            for block, layers in self.iter_stacked()
            if has_value(insert_shared(block, self.shared), name)
            for number in layers
        )

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> LayerStates:
        # Of gathered parameters: a state has all of embed (token shift), which parameters shard at rest (ZeRO-3).
        return tuple(gather(block).init_state(batch, length, dtype) for block in self.iter_blocks())

    def unstack(self) -> UnrolledStack:
        """Return the same layers as a plain loop, for decoding."""
        return UnrolledStack(tuple(self._index_blocks()), self.shared, self.routing)


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
    """Return `model` with `make(stack)` in place of its stack, or of both stacks of a model with two.
    **Raises** `ValueError` for a model without one."""
    if not any(map(is_stack, jax.tree.leaves(model, is_leaf=is_stack))):
        raise ValueError(f"{type(model).__name__} has no stack of layers")
    return jax.tree.map(lambda x: make(x) if is_stack(x) else x, model, is_leaf=is_stack)


def is_stack(x: Any) -> bool:
    """Return True if `x` is a stack of layers."""
    return isinstance(x, AbstractStack)
