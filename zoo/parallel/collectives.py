"""Sums, shares and places by the name of a dim. Layers speak of dims; only this file knows mesh axes.

Inside `zoo.spmd` JAX knows of every value along which mesh axes it may differ between devices: its varying axes. A sum
is needed exactly where a contracted dim is split, which is where the partial result varies; so nothing here ever asks
how large the mesh is, and on one device every function is the identity.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from zoo.ops.varying import vary, varying

from .layout import Mesh

active_mesh = jax.make_user_context(None)
"""`with mesh_in_force(mesh):` the functions below follow its layout. JAX keys its caches of traced functions by it."""


def current_mesh() -> Mesh | None:
    """The mesh that `zoo.spmd` is computing a share on; None outside it, where arrays are whole."""
    return active_mesh.value


def sharded_axes(x: Array, dim: str) -> tuple[str, ...]:
    """The mesh axes that split `dim` in `x`, outermost first; () where it lies whole."""
    mesh = current_mesh()
    return () if mesh is None else tuple(axis for axis in mesh.axes(dim) if axis in varying(x))


def reduce(x: Array, *, over: str, by: Callable = lax.psum) -> Array:
    """Sum partial results over the shares of a dim that was contracted; the identity where nothing splits it.

    `by` may be `lax.pmax` or `lax.pmin`, which have no gradient.
    """
    axes = sharded_axes(x, over)
    return by(x, axes) if axes else x


def all_gather(x: Array, dim: str, axis: int) -> Array:
    """All of a dim that is split, along `axis` of `x`: the shares of all devices side by side, the same on each. The
    identity where nothing splits it."""
    axes = sharded_axes(x, dim)
    return lax.all_gather(x, axes, axis=axis, tiled=True, to="invarying") if axes else x


def num_shards(x: Array, dim: str) -> int:
    """Into how many shares `dim` is cut in `x`."""
    axes = sharded_axes(x, dim)
    return lax.axis_size(axes) if axes else 1


def shard_offset(x: Array, dim: str, size: int) -> int | Int[Array, ""]:
    """Where this device's share of `dim` begins, when a share holds `size`; 0 where it lies whole."""
    axes = sharded_axes(x, dim)
    return lax.axis_index(axes) * size if axes else 0


def scan(body: Callable, carry: PyTree, xs: PyTree, length: int | None = None) -> tuple[PyTree, PyTree]:
    """`lax.scan`, its first carry cast to vary as the body's result does. `xs` holds at least one step."""

    def grown(carry):
        first = jax.tree.map(lambda x: x[0], xs)
        seen: list[frozenset[str]] = []
        jax.eval_shape(lambda carry, x: seen.extend(map(varying, jax.tree.leaves(body(carry, x)[0]))), carry, first)
        values, treedef = jax.tree.flatten(carry)
        return jax.tree.unflatten(treedef, [vary(x, axes) for x, axes in zip(values, seen, strict=True)])

    def types(tree):
        return [varying(x) for x in jax.tree.leaves(tree)]

    if current_mesh() is not None:
        carry = jax.tree.map(jnp.asarray, carry)
        while types(wider := grown(carry)) != types(carry):
            carry = wider
    return lax.scan(body, carry, xs, length=length)
