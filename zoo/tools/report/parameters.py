"""A model in one line, and the table of its parameters with their dims and sharding."""

import collections
import itertools
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from zoo.models import Stack
from zoo.models.decoder import insert_shared
from zoo.models.parameter_paths import ParameterPath, list_parameters
from zoo.models.stack import is_stack
from zoo.parallel import Mesh
from zoo.parallel.mesh import is_array_or_shape
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
    """Return a row per array of `model`: name, shape, dims, the mesh axes that shard each dim, dtype and size.

    Names are as in `zoo.models.list_parameter_paths`: `layers.*.attention.query.weight`. Where blocks of several kinds
    share a name, their layer numbers follow. Layers in rounds have the same shapes as in one round. Accepts abstract
    models (`eqx.filter_eval_shape`), since nothing is computed.
    """
    arrays = eqx.filter(model, is_array_or_shape)
    parameters = list_parameters(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays))
    names = collections.Counter(path.name for path, _ in parameters)
    rows = []
    for path, x in parameters:
        sharded = []
        if path.dims:
            for dim, axes in zip(path.dims, mesh.spec(path.dims, x.shape, path.name), strict=False):
                if isinstance(axes, str):  # JAX unpacks single axes
                    axes = (axes,)
                if axes:
                    sharded.append(f"{dim.name} over {' x '.join(axes)}")
        name = path.name if names[path.name] == 1 else _disambiguate_name(path)
        rows.append(
            ParameterRow(
                name=name,
                shape=" x ".join(map(str, x.shape)),
                dims=" ".join(dim.name for dim in path.dims),
                layout=", ".join(sharded) or "replicated",
                dtype=x.dtype.name,
                count=x.size,
                bytes=x.size * x.dtype.itemsize,
            )
        )
    return rows


def _disambiguate_name(path: ParameterPath) -> str:
    """Return a parameter's name with its layers; outside of a `Module`, where all arrays share a name, the tree's."""
    if not path.ranges:
        return path.leaf.name
    numbers = path.ranges[0]
    if len(numbers) == 1:
        return f"{path.name} ({numbers[0]})"
    step = f" by {numbers.step}" if numbers.step > 1 else ""
    return f"{path.name} ({numbers[0]}-{numbers[-1]}{step})"
