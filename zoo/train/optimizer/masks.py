"""Masks of parameters for optimizers, by the number of dims without the stacked ones: the scale of a norm is
[layers, embed] in a stack, and still a vector."""

from jaxtyping import PyTree

from zoo.parallel import Leaf, map_leaves

STACKED_DIMS = ("layers", "rounds", "ends", "experts")
"""Dims along which arrays of layers and of experts are stacked."""


def matrix_mask(params: PyTree) -> PyTree:
    """Return True for every matrix, not counting stacked dims: the parameters of Muon or Shampoo."""
    return map_leaves(lambda leaf, x: _count_unstacked_dims(leaf, x.ndim) == 2, params)


def decay_mask(params: PyTree) -> PyTree:
    """Return True for matrices and embeddings, False for biases and norm scales: the weight decay mask.

    `optax.adamw(schedule, mask=train.decay_mask)`.
    """
    return map_leaves(lambda leaf, x: _count_unstacked_dims(leaf, x.ndim) >= 2, params)


def _count_unstacked_dims(leaf: Leaf, ndim: int) -> int:
    return ndim if leaf.dims is None else sum(dim.name not in STACKED_DIMS for dim in leaf.dims)
