"""Which parameters an optimizer treats as matrices. What depends on rank must know that layers and experts are stacked:
a norm's scale is [layers, embed] in a stack, and no matrix."""

from jaxtyping import PyTree

from zoo.parallel import Leaf, map_leaves

_STACKED_DIMS = ("layers", "experts")


def matrix_mask(params: PyTree) -> PyTree:
    """True for every array that is a matrix once stacked dims are set aside: for Muon, Shampoo and their like."""
    return map_leaves(lambda leaf, x: _count_unstacked_dims(leaf, x.ndim) == 2, params)


def decay_mask(params: PyTree) -> PyTree:
    """True for what weight decay is meant for, matrices and embeddings; False for biases and the scales of norms.

    For the `mask` of optax: `optax.adamw(schedule, mask=train.decay_mask)`.
    """
    return map_leaves(lambda leaf, x: _count_unstacked_dims(leaf, x.ndim) >= 2, params)


def _count_unstacked_dims(leaf: Leaf, ndim: int) -> int:
    return ndim if leaf.dims is None else sum(dim.name not in _STACKED_DIMS for dim in leaf.dims)
