"""The plain loop: one layer after the other, each compiled."""

import dataclasses
from collections.abc import Callable, Sequence

from zoo.layers import TokenInfo
from zoo.parallel.taps import in_layer

from ..decoder import Hidden, LayerStates
from ..segment import Segment, unstack_tree, vary_arrays
from . import BindLayers, LayerNumber


def run_plain(
    segment: Segment,
    first: LayerNumber,
    hidden: Hidden,
    info: TokenInfo,
    states: LayerStates,
    *,
    bind: BindLayers,
    find_layers: Callable[[str], Sequence[int]],
) -> tuple[Hidden, LayerStates]:
    """Run the layers of a segment one after the other. Their values can be read and edited by name: `find_layers`
    returns the layers that have a value of this name."""
    runs = bind(segment, info)
    repeats = unstack_tree(vary_arrays(segment.blocks), segment.local_repeats)
    layers = [layer for blocks in repeats for layer in zip(runs, blocks, strict=True)]
    routing = [*hidden.routing]
    new_states = []
    for i, (run, arrays) in enumerate(layers):
        with in_layer(first + i, find_layers):
            hidden, state = run(arrays, first + i, hidden.drop_routing(), states[i])
        routing += hidden.routing
        new_states.append(state)
    return dataclasses.replace(hidden, routing=tuple(routing)), tuple(new_states)
