"""Along which mesh axes a value may differ between devices: part of its type in JAX, inside `shard_map`.

A function with a gradient of its own gives cotangents of its operands' own types, so it makes its operands alike first;
the gradient of that cast is the sum over devices. Outside `shard_map` both functions do nothing.
"""

from typing import Any

import jax
from jax import lax
from jaxtyping import PyTree


def varying(x: Any) -> frozenset[str]:
    """The mesh axes along which `x` may differ between devices. The one place that asks JAX."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return frozenset(jax.typeof(x).mat.varying) if manual else frozenset()


def vary(tree: PyTree, axes: frozenset[str] | tuple[str, ...]) -> PyTree:
    """Cast every array to vary over `axes` too. The gradient of the cast is a sum: cast where it should happen once."""
    named = [axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes]
    return jax.tree.map(lambda x: _vary_array(x, named), tree) if named else tree


def _vary_array(x: Any, axes: list[str]) -> Any:
    """One array, cast to vary over those of the axes over which it does not yet."""
    already = varying(x)
    missing = tuple(axis for axis in axes if axis not in already)
    return lax.pcast(x, missing, to="varying") if missing else x
