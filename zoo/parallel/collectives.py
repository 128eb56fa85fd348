"""Collectives by dim name: all-reduce, all-gather, shard counts and offsets. Layers name dims; mesh axes stay in here.

Inside `shard_map`, JAX tracks for each value the mesh axes along which it may differ between devices: its varying axes
(`check_vma`). A contraction over a sharded dim leaves partial sums that vary over that dim's axes, so an all-reduce is
needed exactly there. Nothing here depends on the size of the mesh; on one device every function is the identity.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from zoo.ops.varying import vary, varying

from .mesh import Mesh

active_mesh = jax.make_user_context(None)
"""Context manager, `with active_mesh(mesh):`, that sets the mesh of the functions below. It is part of JAX's trace
cache key."""


def current_mesh() -> Mesh | None:
    """Return the mesh inside `zoo.spmd`, where arrays are device-local shards; None outside, where they are global."""
    return active_mesh.value


def is_pipelined(dim: str) -> bool:
    """Return True if the mesh shards `dim`, of stacked layers, into the stages of a pipeline."""
    mesh = current_mesh()
    return mesh is not None and "pipe" in mesh.axes(dim)


def sharded_axes(x: Array, dim: str) -> tuple[str, ...]:
    """Return the mesh axes that shard `dim` of `x`, outermost first; () if it is replicated."""
    mesh = current_mesh()
    if mesh is None:
        return ()
    return tuple(axis for axis in mesh.axes(dim) if axis in varying(x))


def reduce(x: Array, *, over: str, into: str | None = None, by: Callable = lax.psum) -> Array:
    """All-reduce partial results over the axes that shard a contracted dim; the identity if it is not sharded.

    - `into`: dim of array axis 1. Over the axes that also shard this dim, the sums are reduce-scattered: each device
      receives its shard of the dim.
    - `by`: without `into` also `lax.pmax` or `lax.pmin`, which have no gradient.

    **Raises** `ValueError` if the axes do not divide the dim `into`.
    """
    axes = sharded_axes(x, over)
    mesh = current_mesh()
    if scattered := () if into is None or mesh is None else tuple(axis for axis in axes if axis in mesh.axes(into)):
        check_token_count(x.shape[1], scattered)
        x = lax.psum_scatter(x, scattered, scatter_dimension=1, tiled=True)
        axes = tuple(axis for axis in axes if axis not in scattered)
    return by(x, axes) if axes else x


def check_token_count(tokens: int, axes: tuple[str, ...]) -> None:
    """**Raises** `ValueError` if the mesh axes do not divide the number of tokens."""
    if tokens % (shards := lax.axis_size(axes)):
        raise ValueError(
            f"{tokens} tokens do not divide evenly over {' x '.join(axes)}={shards}, along which this layout shards "
            f"hidden states: use a multiple of {shards} tokens in each row, or a layout without sequence parallelism"
        )


def all_gather(x: Array, dim: str, axis: int) -> Array:
    """All-gather `dim`, which is array axis `axis` of `x`; the result is replicated. The identity if `dim` is not
    sharded."""
    axes = sharded_axes(x, dim)
    return lax.all_gather(x, axes, axis=axis, tiled=True, to="invarying") if axes else x


def shard(x: Array, dim: str, axis: int) -> Array:
    """Slice this device's shard of `dim`, which is array axis `axis`, out of a replicated array: the inverse of
    `all_gather`. The identity if the mesh does not shard `dim`.

    **Raises** `ValueError` if the mesh does not divide the dim.
    """
    mesh = current_mesh()
    if mesh is None or not (axes := mesh.axes(dim)):
        return x
    size, remainder = divmod(x.shape[axis], lax.axis_size(axes))
    if remainder:
        raise ValueError(
            f"{x.shape[axis]} {dim} do not divide evenly over {' x '.join(axes)}={lax.axis_size(axes)}: use a multiple"
        )
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis)


def num_shards(x: Array, dim: str) -> int:
    """Return the number of shards of `dim` in `x`; 1 if it is replicated."""
    axes = sharded_axes(x, dim)
    return lax.axis_size(axes) if axes else 1


def shard_offset(x: Array, dim: str, size: int) -> int | Int[Array, ""]:
    """Return the global index of the first element of this device's shard of `dim`, for shards of `size` elements; 0 if
    `dim` is replicated."""
    axes = sharded_axes(x, dim)
    return lax.axis_index(axes) * size if axes else 0


def scan(
    body: Callable, carry: PyTree, xs: PyTree, length: int | None = None, *, unroll: int = 1
) -> tuple[PyTree, PyTree]:
    """`lax.scan` with the initial carry cast (`pcast`) to the varying axes of the carry that `body` returns. `xs` holds
    at least one step."""
    if current_mesh() is not None:
        x = jax.tree.map(lambda x: x[0], xs)
        carry = vary_as_returned(lambda carry: body(carry, x)[0], carry)
    return lax.scan(body, carry, xs, length=length, unroll=unroll)


def while_loop(condition: Callable, body: Callable, carry: PyTree) -> PyTree:
    """`lax.while_loop` with the initial carry cast to the dtypes and the varying axes of the carry that `body`
    returns."""
    returned = jax.eval_shape(body, carry)
    carry = jax.tree.map(lambda x, like: lax.convert_element_type(x, like.dtype), carry, returned)
    return lax.while_loop(condition, body, carry if current_mesh() is None else vary_as_returned(body, carry))


def vary_as_returned(body: Callable, carry: PyTree) -> PyTree:
    """Cast a carry to the varying axes of the carry that `body` returns for it, until they are the same."""

    def widen(carry):
        axes: list[frozenset[str]] = []
        jax.eval_shape(lambda carry: axes.extend(map(varying, jax.tree.leaves(body(carry)))), carry)
        values, treedef = jax.tree.flatten(carry)
        return jax.tree.unflatten(treedef, [vary(value, names) for value, names in zip(values, axes, strict=True)])

    def varying_axes(tree):
        return [varying(x) for x in jax.tree.leaves(tree)]

    carry = jax.tree.map(jnp.asarray, carry)
    while varying_axes(wider := widen(carry)) != varying_axes(carry):
        carry = wider
    return carry
