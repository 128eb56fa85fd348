"""ZeRO-3: all-gather parameters that are sharded at rest just before use; reduce-scatter their gradients.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054),
section 5.3; PyTorch calls it fully sharded data parallel, FSDP. Each block is gathered inside the scan over layers, and
gathered parameters are never saved as residuals: a device holds the full parameters of one block at a time.

ZeRO-2 (section 5.2) has the same backward pass for parameters that are replicated.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from zoo._checks import parse_dtype
from zoo.ops.custom_vjps import run_in_rule

from .collectives import current_mesh, vary, varying
from .mesh import Mesh
from .module import Leaf, is_parameter, leaves, map_leaves
from .taps import current_taps
from .trainable_copy import materialize

_GatherDims = tuple[tuple[int, tuple[str, ...]], ...]
"""Array axes to gather, each with the mesh axes that shard it at rest."""


class _Parameter(eqx.Module):
    """A parameter whose gradient is reduce-scattered, with the compute `dtype` that `gather` casts it to.

    It replaces the array until `gather`, so that the cast, the all-gather and the reduce-scatter are one custom VJP.
    """

    array: Array
    """The parameter at rest."""
    dtype: Any = eqx.field(static=True)
    gradient_shard: Array | None = None
    """NaNs that the loss is differentiated with respect to, where the gradient has another sharding than the array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape at rest: models check the number of learned positions before they gather them."""
        return self.array.shape


def cast(model: PyTree, dtype: Any) -> PyTree:
    """Cast parameters, trainable and frozen, to a compute dtype; those declared `full_precision` keep theirs.

    Call it inside the loss, so that the optimizer keeps its master parameters. Shards are cast before the all-gather,
    which then moves fewer bytes; gradients are summed over devices in float32 and returned in the parameters' dtype.

    **Raises** `TypeError` for a word that names no dtype, and `ValueError` for a dtype that is not floating point.
    """
    dtype = parse_dtype(dtype)
    mesh = current_mesh()

    def cast_leaf(leaf, x):
        if leaf.full_precision or not is_parameter(leaf, x.array if _is_wrapped(x) else x):
            return x
        if _is_wrapped(x):
            return _Parameter(x.array, dtype, x.gradient_shard)
        is_sharded = mesh is not None and leaf.dims is not None and mesh.find_gather_dims(leaf.dims)
        return _Parameter(x, dtype) if is_sharded else x.astype(dtype)

    return _map_parameters(cast_leaf, model)


@jax.named_scope("gather")
def gather(module: PyTree) -> PyTree:
    """All-gather the parameters of `module` that are sharded at rest, and replace each `TrainableCopy` by its value.

    The backward pass is a reduce-scatter: each device receives its shard of the gradient, summed over devices in
    float32. The axes come from the layout, not from the varying axes, because a parameter may vary over an axis that
    does not shard it. Outside `zoo.spmd` no parameter is gathered.
    """
    gathered = _gather(module)
    if (taps := current_taps()) is not None:
        taps.log.aliases.append((gathered, module))  # values of the new object have the names of the old one
    return gathered


def _gather(module: PyTree) -> PyTree:
    mesh = current_mesh()
    if mesh is None:
        return materialize(module)

    def gather_leaf(leaf, x):
        dims = leaf.dims or ()
        gather_dims = tuple(mesh.find_gather_dims(dims))
        if not _is_wrapped(x) and not gather_dims:
            return x
        parameter = x if _is_wrapped(x) else _Parameter(x, x.dtype)
        array = parameter.array
        dtypes = (parameter.dtype, parameter.array.dtype)
        if parameter.gradient_shard is None:
            return _use_parameter(gather_dims, gather_dims, dtypes, array, None)
        scatter_dims = tuple(mesh.gradients.find_gather_dims(dims))
        return _use_parameter(gather_dims, scatter_dims, dtypes, parameter.gradient_shard, array)

    return materialize(_map_parameters(gather_leaf, module))


def make_gradient_shards(parameters: PyTree, mesh: Mesh) -> PyTree:
    """Return NaNs with the shape of the gradient's shard for each parameter whose gradient is sharded otherwise than
    itself (ZeRO-2), and the other parameters as they are. The loss is differentiated with respect to the result.

    `gather` reads no values of these arrays. A loss that computes with the leaves of a model itself gets NaN; with
    zeros it would silently lose their gradient.
    """

    def make(leaf, x):
        if not _shards_gradient(leaf, mesh):
            return x
        shape = list(x.shape)
        for dim, axes in mesh.find_gather_dims(leaf.dims):
            shape[dim] *= math.prod(mesh.shape[axis] for axis in axes)
        for dim, axes in mesh.gradients.find_gather_dims(leaf.dims):
            shape[dim] //= math.prod(mesh.shape[axis] for axis in axes)
        return vary(jnp.full(shape, jnp.nan, x.dtype), varying(x))

    return parameters if mesh.layout.gradients is None else map_leaves(make, parameters)


def attach_gradient_shards(model: PyTree, gradient_shards: PyTree, mesh: Mesh) -> PyTree:
    """Return `model` with the result of `make_gradient_shards` in place of its trainable parameters: `gather` then
    returns the parameters, and their gradients are the gradients of the shards."""

    def attach(leaf, x, shard):
        if shard is None:
            return x
        return _Parameter(x, x.dtype, shard) if _shards_gradient(leaf, mesh) else shard

    if mesh.layout.gradients is None:
        return eqx.combine(gradient_shards, model)
    return map_leaves(attach, model, gradient_shards)


def _shards_gradient(leaf: Leaf, mesh: Mesh) -> bool:
    return leaf.dims is not None and mesh.find_gather_dims(leaf.dims) != mesh.gradients.find_gather_dims(leaf.dims)


def _is_wrapped(x: Any) -> bool:
    return isinstance(x, _Parameter)


def _map_parameters(function: Callable, tree: PyTree) -> PyTree:
    """`map_leaves` with each `_Parameter` as one leaf."""
    values, treedef = jax.tree.flatten(tree, is_leaf=_is_wrapped)
    arrays = treedef.unflatten(x.array if _is_wrapped(x) else x for x in values)
    return treedef.unflatten(map(function, leaves(arrays), values))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _use_parameter(
    gather_dims: _GatherDims, scatter_dims: _GatherDims, dtypes: tuple[Any, Any], shard: Array, array: Array | None
) -> Array:
    """Cast and all-gather `array`, or `shard` if `array` is None. The gradient of `shard` is reduce-scattered.

    - `dtypes`: of the result, and of the gradient.
    """
    parameter = (shard if array is None else array).astype(dtypes[0])
    for dim, axes in gather_dims:
        parameter = lax.all_gather(parameter, axes, axis=dim, tiled=True)
    return parameter


def _use_parameter_fwd(gather_dims: _GatherDims, scatter_dims: _GatherDims, dtypes: tuple[Any, Any], *arrays: Any):
    return run_in_rule(_use_parameter, gather_dims, scatter_dims, dtypes, *arrays), None


def _use_parameter_bwd(
    gather_dims: _GatherDims, scatter_dims: _GatherDims, dtypes: tuple[Any, Any], _: None, gradient: Array
) -> tuple[Array, None]:
    shard = gradient.astype(jnp.float32)
    for dim, axes in reversed(scatter_dims):
        shard = lax.psum_scatter(shard, axes, scatter_dimension=dim, tiled=True)
    return shard.astype(dtypes[1]), None


_use_parameter.defvjp(_use_parameter_fwd, _use_parameter_bwd)
