"""What is stored in pieces is brought together just before it is used, and let go of after: ZeRO-3.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054),
section 5.3. A block's parameters are gathered inside the scan over layers, so one block is whole at a time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from .collectives import current_mesh
from .module import is_parameter, leaves, map_leaves
from .trainable_copy import materialize

Remat = Literal["none", "elementwise", "dots", "full"]
_GatherDims = tuple[tuple[int, tuple[str, ...]], ...]


class _Shard(eqx.Module):
    """A parameter that is stored in pieces and still lies in pieces; `dtype` is what it is to be once gathered.

    Stands in for the array between `cast` and `gather`, so that the cast and the gather have one common gradient.
    """

    array: Array
    dtype: Any = eqx.field(static=True)


def cast(model: PyTree, dtype: Any) -> PyTree:
    """The model with its parameters, learnt or frozen, in a compute dtype; those declared `full_precision` keep theirs.

    Call it inside the loss: what the optimizer holds stays as it is. Shards are cast before they are gathered, so that
    what travels is small; gradients are summed over devices in float32 and come back in the dtype of the parameters.
    """
    mesh = current_mesh()

    def one(leaf, x):
        if leaf.full_precision or not is_parameter(leaf, x):
            return x
        in_pieces = mesh is not None and leaf.dims is not None and mesh.find_gather_dims(leaf.dims)
        return _Shard(x, jnp.dtype(dtype)) if in_pieces else x.astype(dtype)

    return map_leaves(one, model)


@jax.named_scope("gather")
def gather(module: PyTree) -> PyTree:
    """Bring together all parameters of `module` that the layout stores in pieces, which outside `zoo.spmd` are none;
    and put a plain array in place of every `Learnt`.

    The gradient scatters: every device gets the sum over devices, taken in float32, of its own piece. What is in pieces
    is read off the layout, not off the varying axes: a parameter may vary over an axis that does not split it.
    """
    mesh = current_mesh()
    if mesh is None:
        return materialize(module)
    values, treedef = jax.tree.flatten(module, is_leaf=_is_shard)

    def one(leaf, x):
        places = tuple(mesh.find_gather_dims(leaf.dims)) if leaf.dims is not None else ()
        shard = x if _is_shard(x) else _Shard(x, x.dtype) if places else None
        return x if shard is None else _all_gather_parameter(places, shard.dtype, shard.array.dtype, shard.array)

    return materialize(jax.tree.unflatten(treedef, list(map(one, leaves(module), values))))


def _is_shard(x: Any) -> bool:
    return isinstance(x, _Shard)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _all_gather_parameter(gather_dims: _GatherDims, dtype: Any, stored_dtype: Any, shard: Array) -> Array:
    whole = shard.astype(dtype)
    for place, axes in gather_dims:
        whole = lax.all_gather(whole, axes, axis=place, tiled=True)
    return whole


def _all_gather_parameter_fwd(
    gather_dims: _GatherDims, dtype: Any, stored_dtype: Any, shard: Array
) -> tuple[Array, None]:
    return _all_gather_parameter(gather_dims, dtype, stored_dtype, shard), None


def _all_gather_parameter_bwd(
    gather_dims: _GatherDims, dtype: Any, stored_dtype: Any, _: None, gradient: Array
) -> tuple[Array]:
    pieces = gradient.astype(jnp.float32)
    for place, axes in reversed(gather_dims):
        pieces = lax.psum_scatter(pieces, axes, scatter_dimension=place, tiled=True)
    return (pieces.astype(stored_dtype),)


_all_gather_parameter.defvjp(_all_gather_parameter_fwd, _all_gather_parameter_bwd)


_REMAT_POLICIES = {
    "none": jax.checkpoint_policies.everything_saveable,
    "elementwise": jax.checkpoint_policies.dots_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
_ALWAYS_RECOMPUTED = ("all_gather", "all_gather_invariant", "pvary", "pcast")


def rematerialize(function: Callable, remat: Remat) -> Callable:
    """`function`, whose backward pass computes again what `remat` says: "none" of it; all that is
    "elementwise" and no matrix product; all but "dots", products without batch dims, so that attention's are computed
    again too; or the "full" function.

    Whatever the choice, parameters that were gathered are not kept for the backward pass but gathered again: else a
    scan over layers would hold every layer whole.
    """
    if remat not in _REMAT_POLICIES:
        raise ValueError(f"remat is one of {', '.join(_REMAT_POLICIES)}, not {remat!r}")
    mesh = current_mesh()
    in_pieces = mesh is not None and any(
        mesh.shape[axis] > 1 for row in mesh.layout.parameters.values() for axis in row
    )
    if remat == "none" and not in_pieces:
        return function

    def policy(primitive, *arguments, **parameters):
        calls = [(primitive, arguments, parameters)]  # what has a gradient of its own comes as one call
        inside = getattr(parameters.get("call_jaxpr"), "eqns", ())
        calls += [(eqn.primitive, [x.aval for x in eqn.invars], eqn.params) for eqn in inside]
        gathers = any(primitive.name in _ALWAYS_RECOMPUTED for primitive, _, _ in calls)
        return not gathers and any(_REMAT_POLICIES[remat](one, *given, **options) for one, given, options in calls)

    return jax.checkpoint(function, policy=policy, prevent_cse=False)
