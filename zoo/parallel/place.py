"""Put trees onto a mesh, or make them there."""

import logging
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Key, PyTree

from .layout import Mesh, lies_whole

log = logging.getLogger("zoo")


def place(tree: PyTree, mesh: Mesh) -> PyTree:
    """`tree`, every array where the layout wants it: in modules by their annotations, loose arrays whole everywhere.

    Inside `jit` it says where a result is to lie. An optimiser's state belongs on `mesh.updates`. An array that lies
    right already is not copied: donate one of the two, and the other is gone.

    **Raises** `ValueError` for an unknown dim or a size that the mesh does not divide, before anything moves.
    """
    arrays, rest = eqx.partition(tree, eqx.is_array)
    shardings = mesh.shardings(arrays)
    tell(arrays, mesh)

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
    tell(shapes, mesh)
    arrays = jax.jit(lambda key: eqx.filter(make(key), eqx.is_array), out_shardings=shardings)(key)
    return eqx.combine(arrays, rest)


def place_batch(batch: PyTree, mesh: Mesh) -> PyTree:
    """The rows of a batch, shared out over the axes that split `batch`, their second dim over those that split `seq`.

    With several processes each passes the rows that are its own (`train.data` makes them so); the result is global.

    **Raises** `ValueError` for a number of rows that the mesh does not divide.
    """
    shardings = mesh.shardings(batch, ("batch", "seq"))
    if jax.process_count() == 1:
        return jax.device_put(batch, shardings)
    return jax.tree.map(lambda x, s: jax.make_array_from_process_local_data(s, np.asarray(x)), batch, shardings)


def tell(tree: Any, mesh: Mesh) -> None:
    for line in lies_whole(tree, mesh):
        log.warning(line)
