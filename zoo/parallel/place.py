"""Put trees onto a mesh, or make them there."""

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

from .layout import Mesh, replicated_dims
from .module import Module

logger = logging.getLogger("zoo")

BATCH_DIMS = ("batch", "seq")
"""What the first dims of an array are that stands in no module."""


def place(tree: PyTree, mesh: Mesh) -> PyTree:
    """`tree`, every array where the layout wants it: in modules by their annotations, loose arrays whole everywhere.

    Inside `jit` it says where a result is to lie. An optimizer's state belongs on `mesh.updates`. An array that lies
    right already is not copied: donate one of the two, and the other is gone.

    **Raises** `ValueError` for an unknown dim or a size that the mesh does not divide, before anything moves.
    """
    arrays, rest = eqx.partition(tree, eqx.is_array)
    shardings = mesh.shardings(arrays)
    if isinstance(tree, Module) and not any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays)):
        warn_replicated(arrays, mesh)

    def put(x, sharding):
        if isinstance(x, Tracer):
            return lax.with_sharding_constraint(x, sharding)
        return jax.device_put(x, sharding)

    return eqx.combine(jax.tree.map(put, arrays, shardings), rest)


def init(make: Callable[[Key[Array, ""]], PyTree], key: Key[Array, ""], mesh: Mesh) -> PyTree:
    """`make(key)`, born in place: every device computes its own share, and nothing is whole anywhere.

    The numbers are those of `make(key)` on one device. **Raises** as `place`, before anything is computed.
    """
    abstract = eqx.filter_eval_shape(make, key)
    shapes, rest = eqx.partition(abstract, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    shardings = mesh.shardings(shapes)
    warn_replicated(shapes, mesh)
    arrays = jax.jit(lambda key: eqx.filter(make(key), eqx.is_array), out_shardings=shardings)(key)
    return eqx.combine(arrays, rest)


def place_batch(batch: PyTree, mesh: Mesh) -> PyTree:
    """The rows of a batch, shared out over the axes that split `batch`, their second dim over those that split `seq`.

    With several processes each passes the rows that are its own (`train.data` makes them so); the result is global.

    **Raises** `ValueError` for a number of rows that the mesh does not divide, or an axis that rows are not split over
    but processes are.
    """
    processes = jax.process_count()
    if processes == 1:
        return jax.device_put(batch, mesh.shardings(batch, BATCH_DIMS))
    if math.prod(mesh.shape[axis] for axis in mesh.axes("batch")) % processes:
        raise ValueError(
            f"{processes} processes bring rows of their own, so the axes that split the batch have to multiply to a "
            f"multiple of {processes}, and {mesh} does not: let fsdp or data span the processes, and tensor stay in one"
        )
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct((processes * x.shape[0], *x.shape[1:]), x.dtype), batch)
    shardings = mesh.shardings(whole, BATCH_DIMS)

    def put(x, sharding, whole):
        return jax.make_array_from_process_local_data(sharding, np.asarray(x), whole.shape)

    return jax.tree.map(put, batch, shardings, whole)


def warn_replicated(tree: Any, mesh: Mesh) -> None:
    for line in replicated_dims(tree, mesh):
        logger.warning(line)
