"""Varying mesh axes (JAX's varying manual axes, `vma`): the axes along which a value may differ between devices.

A custom VJP must return cotangents with the types of its operands, so such functions first cast all operands to vary
over the same axes; the gradient of that cast is an all-reduce. Outside `shard_map` these functions do nothing.
"""

from typing import Any

import jax
from jax import lax
from jaxtyping import PyTree


def varying(x: Any) -> frozenset[str]:
    """Return the mesh axes along which `x` may differ between devices. The only place that asks JAX."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return frozenset()
    return frozenset(jax.typeof(x).mat.varying)


def vary(tree: PyTree, axes: frozenset[str] | tuple[str, ...]) -> PyTree:
    """Cast every array of a tree to vary over `axes` too. The gradient of the cast is an all-reduce over these axes."""
    ordered = [axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes]
    if not ordered:
        return tree
    return jax.tree.map(lambda x: _vary_array(x, ordered), tree)


def align_varying(*trees: Any) -> tuple[Any, ...]:
    """Cast all arrays of the trees to vary over the union of their varying mesh axes; None stays None.

    Arrays that already vary so are returned as they are, not copied: residuals of a scan over layers stay references.
    """
    return vary(trees, frozenset().union(*(varying(x) for x in jax.tree.leaves(trees))))


def _vary_array(x: Any, axes: list[str]) -> Any:
    """Cast one array to vary over the axes along which it does not vary yet."""
    already = varying(x)
    missing = tuple(axis for axis in axes if axis not in already)
    if not missing:
        return x
    return lax.pcast(x, missing, to="varying")
