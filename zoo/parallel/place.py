"""Shard pytrees over a mesh: `place` arrays, `init` a model sharded."""

import logging
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Key, PyTree

from zoo._checks import check_not_donated, describe_argument, wrap_key

from .imagined import is_imagined
from .mesh import Mesh, is_array_or_shape, replicated_dims, require_mesh
from .module import Module, leaves
from .rounds import split_rounds

_logger = logging.getLogger("zoo")


def place(tree: PyTree, mesh: Mesh) -> PyTree:
    """Shard every array of `tree` over the mesh: arrays in modules by their annotations; all others are replicated.

    Inside `jit` it is a sharding constraint. An array that already has its sharding is not copied: donating the
    argument or the result deletes both. A `jax.ShapeDtypeStruct` gets its sharding, from which `zoo.inspect.compiled`
    compiles.

    Optimizer state goes to `mesh.optimizer`. Arrays of another shape than their parameter, as optax.adafactor and sm3
    keep them, are replicated unless their dims fit. Place such a state again in each step; otherwise the second step
    compiles again.

    **Raises** `ValueError` for an unknown dim or a size that the mesh does not divide, before any transfer; for an
    array if the devices are `imagined`; and for layers in rounds with an optimizer state of other shapes.
    """
    require_mesh(mesh)
    check_not_donated(tree)
    _check_rounds(tree, mesh)
    arrays, rest = eqx.partition(deal_out(tree, mesh), is_array_or_shape)
    shardings = mesh.shardings(arrays, uneven_state=True)
    if isinstance(tree, Module) and not any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays)):
        warn_replicated(arrays, mesh)

    def place_array(x, sharding):
        if isinstance(x, Tracer):
            return lax.with_sharding_constraint(x, sharding)
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(sharding=sharding)
        refuse_imagined(mesh)
        return jax.device_put(copy_buffer(x), sharding)

    return eqx.combine(jax.tree.map(place_array, arrays, shardings), rest)


def deal_out(tree: PyTree, mesh: Mesh) -> PyTree:
    """Return a tree with its layers in as many rounds as the pipeline of the mesh has."""
    return split_rounds(tree, mesh.layout.rounds)


def _check_rounds(tree: PyTree, mesh: Mesh) -> None:
    """Check that the layers of an optimizer state can be dealt out in the rounds of the mesh, if it has several."""
    if mesh.layout.rounds == 1:
        return
    for leaf in leaves(tree):
        if not leaf.fits:
            raise ValueError(
                f"{leaf.name}: an array of this optimizer does not have the dims of its parameter, so its layers "
                f"cannot be dealt out in rounds={mesh.layout.rounds}: take rounds=1, or an optimizer with one array of "
                "the parameter's shape per moment"
            )


def copy_buffer(x: Any) -> Any:
    """Copy a NumPy array before it is put on devices: its owner may fill it again. Return anything else as it is.

    `jax.device_put` shares the memory of aligned arrays on CPUs, with `may_alias=False` too (jax 0.10.2), and elsewhere
    reads it after it has returned.
    """
    return x.copy() if isinstance(x, np.ndarray) else x


def refuse_imagined(mesh: Mesh) -> None:
    if is_imagined(mesh.devices.devices.flat[0]):
        raise ValueError(
            "the devices of this mesh are imagined and hold no arrays: make shapes by eqx.filter_eval_shape, "
            "give them shardings by zoo.place or zoo.place_batch, and pass them to zoo.inspect.compiled"
        )


def init(make: Callable[[Key[Array, ""]], PyTree], key: Key[Array, ""], mesh: Mesh) -> PyTree:
    """Initialize `make(key)` sharded: every device computes its own shards, and no array is ever unsharded in memory.

    The values are the same as from `make(key)` on one device. **Raises** as `place` does, before anything is computed.
    """
    require_mesh(mesh)
    refuse_imagined(mesh)
    if not isinstance(make, Callable) or isinstance(make, Module):
        raise TypeError(
            f"expected a function key -> model, got {describe_argument(make)}: zoo.init(partial(make, ...), key, "
            "mesh) initializes a model in its shards, and zoo.place(model, mesh) shards one that is there"
        )
    key = wrap_key(key)
    make_placed = lambda key: deal_out(make(key), mesh)
    abstract = eqx.filter_eval_shape(make_placed, key)
    shapes, rest = eqx.partition(abstract, is_array_or_shape)
    shardings = mesh.shardings(shapes)
    warn_replicated(shapes, mesh)
    arrays = jax.jit(lambda key: eqx.filter(make_placed(key), eqx.is_array), out_shardings=shardings)(key)
    return eqx.combine(arrays, rest)


def warn_replicated(tree: Any, mesh: Mesh) -> None:
    for line in replicated_dims(tree, mesh):
        _logger.warning(line)
