"""The signature of all runners, and of the functions that run one layer, which they call."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array, Int

from zoo.layers import TokenInfo

from ..decoder import Hidden, LayerStates
from ..segment import Segment

LayerNumber = int | Int[Array, ""]
"""Number of a layer in its model: an array in a scan and in a pipeline, where one program runs several layers."""

Runner = Callable[[Segment, LayerNumber, Hidden, TokenInfo, LayerStates], tuple[Hidden, LayerStates]]
"""A function `(segment, first, hidden, info, states) -> (hidden, states)`: run the layers of a segment, of which the
first has the number `first`. There is a state for each layer, None in training."""

RunLayer = Callable[[Any, LayerNumber, Hidden, Any], tuple[Hidden, Any]]
"""A function `(arrays, number, hidden, state) -> (hidden, state)`: run a layer with these arrays of its block. `hidden`
is given without routing, and returned with that of this layer only."""

BindLayers = Callable[[Segment, TokenInfo], Sequence[RunLayer]]
"""A function `(segment, info) -> functions`, a `RunLayer` for each block of the pattern."""
