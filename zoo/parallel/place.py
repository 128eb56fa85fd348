"""Shard pytrees over a mesh: `place` arrays, `init` a model sharded, `place_batch` from one or several processes."""

import logging
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Key, PyTree

from zoo._checks import check_batch_ids

from .imagined import is_imagined
from .layout import Mesh, is_array_or_shape, replicated_dims
from .module import Module

_logger = logging.getLogger("zoo")

BATCH_DIMS = ("batch", "seq")
"""Leading dims of arrays that are not in a module."""


def place(tree: PyTree, mesh: Mesh) -> PyTree:
    """Shard every array of `tree` over the mesh: arrays in modules by their annotations; all others are replicated.

    Inside `jit` it is a sharding constraint. Optimizer state goes to `mesh.optimizer`. An array that already has its
    sharding is not copied: donating either one of the two deletes both. A `jax.ShapeDtypeStruct` gets its sharding,
    from which `zoo.inspect.compiled` compiles.

    **Raises** `ValueError` for an unknown dim or a size that the mesh does not divide, before any transfer, and for an
    array if the devices are `imagined`.
    """
    arrays, rest = eqx.partition(tree, is_array_or_shape)
    shardings = mesh.shardings(arrays)
    if isinstance(tree, Module) and not any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays)):
        warn_replicated(arrays, mesh)

    def place_array(x, sharding):
        if isinstance(x, Tracer):
            return lax.with_sharding_constraint(x, sharding)
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(sharding=sharding)
        _refuse_imagined(mesh)
        return jax.device_put(x, sharding)

    return eqx.combine(jax.tree.map(place_array, arrays, shardings), rest)


def _refuse_imagined(mesh: Mesh) -> None:
    if is_imagined(mesh.devices.devices.flat[0]):
        raise ValueError(
            "the devices of this mesh are imagined and hold no arrays: make shapes by eqx.filter_eval_shape, "
            "give them shardings by zoo.place or zoo.place_batch, and pass them to zoo.inspect.compiled"
        )


def init(make: Callable[[Key[Array, ""]], PyTree], key: Key[Array, ""], mesh: Mesh) -> PyTree:
    """Initialize `make(key)` sharded: every device computes its own shards, and no array is ever unsharded in memory.

    The values are those of `make(key)` on one device. **Raises** as `place` does, before anything is computed.
    """
    _refuse_imagined(mesh)
    abstract = eqx.filter_eval_shape(make, key)
    shapes, rest = eqx.partition(abstract, is_array_or_shape)
    shardings = mesh.shardings(shapes)
    warn_replicated(shapes, mesh)
    arrays = jax.jit(lambda key: eqx.filter(make(key), eqx.is_array), out_shardings=shardings)(key)
    return eqx.combine(arrays, rest)


def place_batch(batch: PyTree, mesh: Mesh, *, vocab: int | None = None) -> PyTree:
    """Shard a batch over the mesh: the first dim of each array is `batch`, the second `seq`.

    With several processes each passes its own rows; the result is the global array. `jax.ShapeDtypeStruct`s are
    those of the global arrays, and get their shardings.

    - `vocab`: size of the vocabulary. If given, `tokens` and `targets` of the batch are checked against it, on the
      host: inside a program an id outside the vocabulary can only give a loss of NaN.

    **Raises** `ValueError` for a number of rows that the mesh does not divide, if processes span an axis that does not
    shard the batch, and for tokens outside of `vocab` or targets beyond it. Negative targets are ignored by the loss.
    """
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch)):
        return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), batch, mesh.shardings(batch, BATCH_DIMS))
    _refuse_imagined(mesh)
    if vocab is not None:
        check_batch_ids(batch, vocab)
    processes = jax.process_count()
    if processes == 1:
        return jax.device_put(batch, mesh.shardings(batch, BATCH_DIMS))
    if math.prod(mesh.shape[axis] for axis in mesh.axes("batch")) % processes:
        raise ValueError(
            f"{processes} processes pass rows of the batch, so the sizes of the axes that shard it have to multiply to "
            f"a multiple of {processes}, which those of {mesh} do not: let data or fsdp span the processes, and keep "
            "tensor inside one"
        )
    global_shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((processes * x.shape[0], *x.shape[1:]), x.dtype), batch)
    shardings = mesh.shardings(global_shapes, BATCH_DIMS)

    def make_global_array(x, sharding, abstract):
        return jax.make_array_from_process_local_data(sharding, np.asarray(x), abstract.shape)

    return jax.tree.map(make_global_array, batch, shardings, global_shapes)


def warn_replicated(tree: Any, mesh: Mesh) -> None:
    for line in replicated_dims(tree, mesh):
        _logger.warning(line)
