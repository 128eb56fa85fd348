"""Gathers that XLA adds to a step outside of `shard_map`, where arrays are whole and constraints set their sharding.

In ZeRO-1 and ZeRO-2 a device updates the part of the parameters whose moments it holds, and all gather the result.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from .inlining import ELEMENTWISE, VIEWS, FlatJaxpr


def iterate_gathers(flat: FlatJaxpr, specs: Mapping[Any, Any], shape: Mapping[str, int]) -> Iterator[tuple]:
    """Yield axes and bytes per device of each array that a constraint gathers.

    `specs` has the partition specs of inputs, and `shape` the sizes of the mesh's axes. The result of an elementwise
    operation is sharded over the axes of all its operands.
    """
    axes = {x: _list_axes(specs.get(x), shape) for x in flat.invars}
    for equation in flat.eqns:
        given = frozenset().union(*(axes.get(x, frozenset()) for x in equation.operands))
        if equation.name == "shard_map":
            for x, spec in zip(equation.outvars, equation.params["out_specs"], strict=True):
                axes[x] = _list_axes(spec, shape)
        elif equation.name == "sharding_constraint":
            (x,) = equation.outvars
            kept = _list_axes(getattr(equation.params["sharding"], "spec", None), shape)
            if gathered := given - kept:
                parts = math.prod(shape[axis] for axis in kept)
                yield tuple(sorted(gathered, key=list(shape).index)), x.aval.size * x.aval.dtype.itemsize // parts
            axes[x] = kept
        elif equation.name in ELEMENTWISE or equation.name in VIEWS:
            axes.update(dict.fromkeys((x for x in equation.outvars if x.aval.shape), given))


def _list_axes(spec: Any, shape: Mapping[str, int]) -> frozenset[str]:
    """Return the axes of size above 1 in a partition spec."""
    names = jax.tree.leaves(tuple(spec or ()))
    return frozenset(name for name in names if shape.get(name, 1) > 1)
