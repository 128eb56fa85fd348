"""Stacked layers in the rounds of an interleaved pipeline (Narayanan et al., arXiv:2104.04473, section 2.2).

With `Layout(rounds=V)` a stage has V parts of the layers, not one. Arrays of stacked layers are then `rounds layers`
instead of `layers`, with `layers` sharded over `pipe`: nothing is permuted, and checkpoints store `layers`.
"""

import abc
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Int, PyTree

from .module import Leaf, Module, map_leaves

_Tree = TypeVar("_Tree", bound=PyTree)


class AbstractLayers(Module):
    """Stacked layers with one leading dim, or with two in rounds. Splitting split layers returns them as they are, and
    so does merging merged ones."""

    @property
    @abc.abstractmethod
    def rounds(self) -> int:
        """Rounds of the arrays; 1 for layers with one leading dim, or without arrays."""

    @abc.abstractmethod
    def split_rounds(self, rounds: int) -> "AbstractLayers":
        """Return the layers with leading dims `rounds layers`. **Raises** `ValueError` if `rounds` does not divide
        them."""

    @abc.abstractmethod
    def merge_rounds(self) -> "AbstractLayers":
        """Return the layers with one leading dim."""


def split_rounds(tree: _Tree, rounds: int) -> _Tree:
    """Deal the layers of a model, of gradients or of optimizer state out in rounds, as `zoo.place` does. Arrays keep
    their sharding over `pipe` and over all other axes.

    **Raises** `ValueError` if `rounds` does not divide the layers."""
    return _map_layers(lambda layers: layers.split_rounds(rounds), tree)


def merge_rounds(tree: _Tree) -> _Tree:
    """Return `tree` with one leading dim of its layers, as it was before `zoo.place` dealt them out in rounds. Arrays
    keep their sharding over `pipe` and over all other axes."""
    return _map_layers(lambda layers: layers.merge_rounds(), tree)


def map_in_one_round(function: Callable[[_Tree], _Tree], tree: _Tree) -> _Tree:
    """Return `function(tree)`: the function receives its layers with one leading dim, and the layers of its result are
    dealt out in as many rounds as before."""
    rounds = count_rounds(tree)
    if rounds == 1:
        return function(tree)
    return split_rounds(function(merge_rounds(tree)), rounds)


def count_rounds(tree: PyTree) -> int:
    """Return the rounds that the layers of a tree are dealt out in; 1 for layers of one leading dim."""
    is_layers = lambda x: isinstance(x, AbstractLayers)
    return max((x.rounds for x in jax.tree.leaves(tree, is_leaf=is_layers) if is_layers(x)), default=1)


def reshape_layers(x: Any, shape: tuple[int, ...]) -> Any:
    """Reshape an array, of JAX or NumPy, or a `jax.ShapeDtypeStruct`, from `layers ...` to `rounds layers ...` or back,
    as `shape` says. The sharding of `layers` stays: one array at a time is all-gathered over `pipe`, and over no other
    axis."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=_reshape_sharding(x.sharding, x.ndim, shape))
    if isinstance(x, Tracer | np.ndarray) or not isinstance(x.sharding, NamedSharding):
        return x.reshape(shape)
    result = _reshape_sharding(x.sharding, x.ndim, shape)
    assert isinstance(result, NamedSharding)
    return _reshape_sharded(x, shape, x.sharding, result)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _reshape_sharded(x: Array, shape: tuple[int, ...], source: NamedSharding, result: NamedSharding) -> Array:
    """Reshape while the leading dims are on every device: XLA by itself would replicate the other dims, too."""

    def replicate_leading(sharding: NamedSharding, count: int) -> NamedSharding:
        spec = PartitionSpec(*[None] * count, *sharding.spec[count:])
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)

    before, after = (1, 2) if x.ndim < len(shape) else (2, 1)
    x = lax.with_sharding_constraint(x, replicate_leading(source, before)).reshape(shape)
    x = lax.with_sharding_constraint(x, replicate_leading(result, after))
    return lax.with_sharding_constraint(x, result)


def _reshape_sharding(sharding: Any, ndim: int, shape: tuple[int, ...]) -> Sharding | None:
    """Return the sharding of an array of `ndim` dims after `reshape_layers`. Axes that do not divide the layers of a
    round are left out: `zoo.place` raises for them by name."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    entries = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    is_split = ndim < len(shape)
    layers, rest = (entries[0], entries[1:]) if is_split else (entries[1], entries[2:])
    axes = (layers,) if isinstance(layers, str) else layers or ()
    if shape[is_split] % math.prod(sharding.mesh.shape[axis] for axis in axes):
        layers = None
    new = [*[None] * is_split, layers, *rest]
    while new and new[-1] is None:  # as Mesh.spec
        new.pop()
    return NamedSharding(sharding.mesh, PartitionSpec(*new), memory_kind=sharding.memory_kind)


def select_round(tree: _Tree, number: int | Int[Array, ""]) -> _Tree:
    """Return one round of the arrays that have a dim `rounds`, which is kept with a size of 1."""
    return map_leaves(lambda leaf, x: lax.dynamic_slice_in_dim(x, number, 1) if has_rounds(leaf) else x, tree)


def add_round(sums: _Tree, tree: _Tree, number: int | Int[Array, ""]) -> _Tree:
    """Add the result of `select_round`, in the dtype of `sums`, to the round that it was taken from."""

    def add(leaf, total, x):
        x = x.astype(total.dtype)
        if not has_rounds(leaf):
            return total + x
        part = lax.dynamic_slice_in_dim(total, number, 1) + x
        return lax.dynamic_update_slice_in_dim(total, part, number, 0)

    return map_leaves(add, sums, tree)


def has_rounds(leaf: Leaf) -> bool:
    """Return True for an array whose first dims are `rounds layers`."""
    return bool(leaf.dims) and leaf.dims[0].name == "rounds"


def _map_layers(function: Callable, tree: _Tree) -> _Tree:
    is_layers = lambda x: isinstance(x, AbstractLayers)
    return jax.tree.map(lambda x: function(x) if is_layers(x) else x, tree, is_leaf=is_layers)
