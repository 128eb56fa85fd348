"""Stacked layers in the rounds of an interleaved pipeline (Narayanan et al., arXiv:2104.04473, section 2.2).

With `Layout(rounds=V)` a stage has V parts of the layers, not one. Arrays of stacked layers are then `rounds layers`
instead of `layers`, of which the second is sharded over `pipe`: nothing is permuted, and checkpoints store `layers`.
"""

import abc
from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax
from jaxtyping import Array, Int, PyTree

from .module import Leaf, Module, map_leaves

_Tree = TypeVar("_Tree", bound=PyTree)


class AbstractLayers(Module):
    """Stacked layers, of one leading dim, or of two in rounds. Splitting what is split returns it, and so merging."""

    @abc.abstractmethod
    def split_rounds(self, rounds: int) -> "AbstractLayers":
        """Return the layers with leading dims `rounds layers`. **Raises** `ValueError` if `rounds` does not divide
        them."""

    @abc.abstractmethod
    def merge_rounds(self) -> "AbstractLayers":
        """Return the layers with one leading dim."""


def split_rounds(tree: _Tree, rounds: int) -> _Tree:
    """Deal the layers of a model, of gradients or of optimizer state out in rounds, as `zoo.place` does."""
    return _map_layers(lambda layers: layers.split_rounds(rounds), tree)


def merge_rounds(tree: _Tree) -> _Tree:
    """Return `tree` with one leading dim of its layers, as it was before `zoo.place` dealt them out in rounds."""
    return _map_layers(lambda layers: layers.merge_rounds(), tree)


def select_round(tree: _Tree, number: int | Int[Array, ""]) -> _Tree:
    """Return one round of the arrays that have a dim `rounds`, which is kept with a size of 1."""
    return map_leaves(lambda leaf, x: lax.dynamic_slice_in_dim(x, number, 1) if _has_rounds(leaf) else x, tree)


def add_round(sums: _Tree, tree: _Tree, number: int | Int[Array, ""]) -> _Tree:
    """Add the result of `select_round`, in the dtype of `sums`, to the round that it was taken from."""

    def add(leaf, total, x):
        x = x.astype(total.dtype)
        if not _has_rounds(leaf):
            return total + x
        part = lax.dynamic_slice_in_dim(total, number, 1) + x
        return lax.dynamic_update_slice_in_dim(total, part, number, 0)

    return map_leaves(add, sums, tree)


def _has_rounds(leaf: Leaf) -> bool:
    return bool(leaf.dims) and leaf.dims[0].name == "rounds"


def _map_layers(function: Callable, tree: _Tree) -> _Tree:
    is_layers = lambda x: isinstance(x, AbstractLayers)
    return jax.tree.map(lambda x: function(x) if is_layers(x) else x, tree, is_leaf=is_layers)
