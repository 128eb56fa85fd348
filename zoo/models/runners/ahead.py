"""A scan over the layers of a segment that gathers the next block while one runs (`zoo.parallel.scan_ahead`)."""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
from jaxtyping import Array, Int

from zoo.layers import TokenInfo
from zoo.parallel import Module, gather
from zoo.parallel.remat import Remat
from zoo.parallel.scan_ahead import scan_ahead

from ..decoder import AbstractBlock, Hidden, LayerStates, RoutingDetail, run_block
from ..segment import Segment, index_tree, vary_arrays
from . import LayerNumber
from .scan import fill_carry, make_carry


def explain_refusal(blocks: Iterable[AbstractBlock], remat: Remat, shared: Sequence[Module]) -> str | None:
    """Say why these layers cannot gather ahead, and what to take instead; None if they can."""
    if remat != "full":
        return f'loop="ahead" computes blocks again in the backward pass: take remat="full", not {remat!r}'
    if shared:
        return 'loop="ahead" with modules that several layers share: take loop="scan"'
    for block in blocks:
        if block.extends_hidden:
            name = type(block).__name__
            return f'loop="ahead" with {name}, which extends the hidden states: take loop="scan"'
    return None


def run_ahead(
    segment: Segment,
    first: LayerNumber,
    hidden: Hidden,
    info: TokenInfo,
    states: LayerStates,
    *,
    routing: RoutingDetail,
) -> tuple[Hidden, LayerStates]:
    """Scan over the repeats of a pattern, and gather the next block while one runs. Layers have no states."""
    period = len(segment.blocks)
    static = eqx.filter(segment.blocks, eqx.is_array, inverse=True)
    gathered_static: dict[int, Any] = {}

    def gather_block(i: int, arrays: Any) -> Any:
        block = gather(eqx.combine(arrays, static[i]))
        arrays, gathered_static[i] = eqx.partition(block, eqx.is_array)
        return arrays

    def run_gathered(i: int, arrays: Any, repeat: Int[Array, ""], carry: Hidden) -> tuple[Hidden, Any]:
        block = eqx.combine(arrays, gathered_static[i])
        layer_info = info.fold_keys(first + period * repeat + i)
        output, _ = run_block(block, fill_carry(carry, hidden), layer_info, None, routing)
        return make_carry(output), output.routing

    gathers = [partial(gather_block, i) for i in range(period)]
    runs = [partial(run_gathered, i) for i in range(period)]
    stacked = [vary_arrays(block) for block in segment.blocks]
    carry, outputs = scan_ahead(gathers, runs, stacked, make_carry(hidden), segment.local_repeats)
    repeats = range(segment.local_repeats)
    sums = [router for repeat in repeats for output in outputs for router in index_tree(output, repeat)]
    return dataclasses.replace(fill_carry(carry, hidden), routing=(*hidden.routing, *sums)), states
