"""ZeRO-3: all-gather parameters that are sharded at rest just before use; reduce-scatter their gradients.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054),
section 5.3; PyTorch calls it fully sharded data parallel, FSDP. Each block is gathered inside the scan over layers, and
gathered parameters are never saved as residuals: a device holds the full parameters of one block at a time.
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
"""Array axes to gather, each with the mesh axes that shard it at rest."""


class _Shard(eqx.Module):
    """A parameter that is sharded at rest, with the compute `dtype` that `gather` casts it to.

    It replaces the array between `cast` and `gather`, so that both have one custom VJP.
    """

    array: Array
    dtype: Any = eqx.field(static=True)


def cast(model: PyTree, dtype: Any) -> PyTree:
    """Cast parameters, trainable and frozen, to a compute dtype; those declared `full_precision` keep theirs.

    Call it inside the loss, so that the optimizer keeps its master parameters. Shards are cast before the all-gather,
    which then moves fewer bytes; gradients are summed over devices in float32 and returned in the parameters' dtype.
    """
    mesh = current_mesh()

    def cast_leaf(leaf, x):
        if leaf.full_precision or not is_parameter(leaf, x):
            return x
        is_sharded = mesh is not None and leaf.dims is not None and mesh.find_gather_dims(leaf.dims)
        return _Shard(x, jnp.dtype(dtype)) if is_sharded else x.astype(dtype)

    return map_leaves(cast_leaf, model)


@jax.named_scope("gather")
def gather(module: PyTree) -> PyTree:
    """All-gather the parameters of `module` that are sharded at rest, and replace each `TrainableCopy` by its value.

    The backward pass is a reduce-scatter: each device receives its shard of the gradient, summed over devices in
    float32. The axes come from the layout, not from the varying axes, because a parameter may vary over an axis that
    does not shard it. Outside `zoo.spmd` no parameter is gathered.
    """
    mesh = current_mesh()
    if mesh is None:
        return materialize(module)
    values, treedef = jax.tree.flatten(module, is_leaf=_is_shard)

    def gather_leaf(leaf, x):
        gather_dims = tuple(mesh.find_gather_dims(leaf.dims)) if leaf.dims is not None else ()
        shard = x if _is_shard(x) else _Shard(x, x.dtype) if gather_dims else None
        return x if shard is None else _all_gather_parameter(gather_dims, shard.dtype, shard.array.dtype, shard.array)

    return materialize(jax.tree.unflatten(treedef, list(map(gather_leaf, leaves(module), values))))


def _is_shard(x: Any) -> bool:
    return isinstance(x, _Shard)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _all_gather_parameter(gather_dims: _GatherDims, dtype: Any, stored_dtype: Any, shard: Array) -> Array:
    parameter = shard.astype(dtype)
    for dim, axes in gather_dims:
        parameter = lax.all_gather(parameter, axes, axis=dim, tiled=True)
    return parameter


def _all_gather_parameter_fwd(
    gather_dims: _GatherDims, dtype: Any, stored_dtype: Any, shard: Array
) -> tuple[Array, None]:
    return _all_gather_parameter(gather_dims, dtype, stored_dtype, shard), None


def _all_gather_parameter_bwd(
    gather_dims: _GatherDims, dtype: Any, stored_dtype: Any, _: None, gradient: Array
) -> tuple[Array]:
    shard = gradient.astype(jnp.float32)
    for dim, axes in reversed(gather_dims):
        shard = lax.psum_scatter(shard, axes, scatter_dimension=dim, tiled=True)
    return (shard.astype(stored_dtype),)


_all_gather_parameter.defvjp(_all_gather_parameter_fwd, _all_gather_parameter_bwd)


_REMAT_POLICIES = {
    "none": jax.checkpoint_policies.everything_saveable,
    "elementwise": jax.checkpoint_policies.dots_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
_ALWAYS_RECOMPUTED = ("all_gather", "all_gather_invariant", "pvary", "pcast")


def rematerialize(function: Callable, remat: Remat, *, prevent_cse: bool = False) -> Callable:
    """Rematerialize `function` (activation checkpointing): recompute residuals in the backward pass, by `remat`.

    - `"none"`: save every residual.
    - `"elementwise"`: save the results of matrix products, recompute everything else.
    - `"dots"`: save the results of matrix products without batch dims, so that attention scores are recomputed too.
    - `"full"`: save only the inputs.

    Gathered parameters are never saved, whatever `remat` is: the backward pass all-gathers them again. Otherwise a loop
    over layers would hold the full parameters of every layer.

    Outside the body of a scan, `prevent_cse` keeps XLA from merging the recomputation with the forward pass.
    """
    if not rematerializes(remat):
        return function

    def policy(primitive, *avals, **params):
        equations = [(primitive, avals, params)]  # a custom VJP is one equation: look at those inside it too
        inside = getattr(params.get("call_jaxpr"), "eqns", ())
        equations += [(eqn.primitive, [x.aval for x in eqn.invars], eqn.params) for eqn in inside]
        if any(primitive.name in _ALWAYS_RECOMPUTED for primitive, _, _ in equations):
            return False
        return any(_REMAT_POLICIES[remat](primitive, *avals, **params) for primitive, avals, params in equations)

    return jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse)


def rematerializes(remat: Remat) -> bool:
    """Return True if `rematerialize` recomputes anything: by `remat`, or because parameters are sharded at rest.

    **Raises** `ValueError` for another policy.
    """
    if remat not in _REMAT_POLICIES:
        raise ValueError(f"remat is one of {', '.join(_REMAT_POLICIES)}, not {remat!r}")
    mesh = current_mesh()
    has_sharded_parameters = mesh is not None and any(
        mesh.shape[axis] > 1 for axes in mesh.layout.parameters.values() for axis in axes
    )
    return remat != "none" or has_sharded_parameters
