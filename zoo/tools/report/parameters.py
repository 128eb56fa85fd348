"""A model in one line, and the table of its parameters with their dims and sharding."""

import collections
import itertools
from typing import Any

import jax
from jaxtyping import PyTree

from zoo.inspect.implementations import format_ranges
from zoo.inspect.parameters import ParameterSummary, list_axes, list_shapes, summarize_parameters
from zoo.models import Stack
from zoo.models.decoder import insert_shared
from zoo.models.stack import is_stack
from zoo.parallel import Mesh
from zoo.parallel.module import count

from .page import ParameterRow

_MAX_GROUPS = 6
"""Groups of equal layers that are listed in order; of more, only counts are given."""


def describe_model(model: Any) -> str:
    """Describe a model by its layers and size: `4 layers of Attention and GatedMLP, 1,066,752 parameters`.

    Layers of a repeating pattern are listed in order, with a count for equal neighbors.
    """
    stacks = [x for x in jax.tree.leaves(model, is_leaf=is_stack) if isinstance(x, Stack)]
    kinds = []
    for stack in stacks:
        for segment in stack.segments:
            blocks = [insert_shared(block, stack.shared) for block in segment.blocks]
            kinds += [*map(_describe_block, blocks)] * segment.num_repeats
    groups = [(kind, len(list(same))) for kind, same in itertools.groupby(kinds)]
    size = f"{count(model):,} parameters"
    if not kinds:
        return f"{type(model).__name__}, {size}"
    if len(groups) > _MAX_GROUPS:
        counts = collections.Counter(kinds)
        groups = [(kind, counts[kind]) for kind in counts]
    layers = []
    for kind, number in groups:
        noun = "layer" if number == 1 else "layers"
        layers.append(f"{number} {noun} of {kind}")
    return f"{', '.join(layers)}; {size}"


def _describe_block(block: Any) -> str:
    """Return the names of a block's sublayers: `Attention and GatedMLP`."""
    sublayers = [getattr(block, name) for name in ("mixer", "ffn") if getattr(block, name, None) is not None]
    return " and ".join(type(sublayer).__name__ for sublayer in sublayers) or type(block).__name__


def tabulate_parameters(model: PyTree, mesh: Mesh) -> list[ParameterRow]:
    """Return a row per parameter of `model`, as in `zoo.summary`: name, shape, dims, the mesh axes that shard each dim,
    dtype and size.

    Where layers of several shapes share a name, their numbers follow. Nothing is computed, so a model of
    `eqx.filter_eval_shape` will do.
    """
    found = summarize_parameters(list_shapes(model), mesh)
    counts = collections.Counter(row.name for row in found)
    rows = []
    for row in found:
        name = row.name
        if counts[name] > 1 and row.layers:
            name = f"{name} ({format_ranges(row.layers)})"
        rows.append(
            ParameterRow(
                name=name,
                shape=" x ".join(map(str, row.shape)),
                dims=row.dims,
                layout=_describe_sharding(row),
                dtype=", ".join(row.dtypes),
                count=row.count,
                bytes=row.bytes,
            )
        )
    return rows


def _describe_sharding(row: ParameterSummary) -> str:
    """Return the mesh axes of each sharded dim: `heads over tensor, embed over fsdp`."""
    pairs = zip(row.dims.split(), list_axes(row.spec), strict=False)
    return ", ".join(f"{dim} over {' x '.join(axes)}" for dim, axes in pairs if axes) or "replicated"
