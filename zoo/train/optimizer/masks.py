"""Masks of parameters for optimizers, by the dims of one layer: the scale of a norm is [layers, embed] in a stack, and
still a vector."""

from typing import Any

from jaxtyping import PyTree

from zoo.layers import AbstractLinear
from zoo.parallel.module import Leaf, map_leaves

_NOT_FEATURES = ("vocab", "grams", "classes", "positions", "token_types", "distances", "conv")
"""Dims that are not hidden features: rows of embeddings, outputs of heads, taps of depthwise filters."""


def linear_mask(params: PyTree) -> PyTree:
    """Return True for the weight of every linear layer, expert and router between hidden features: the matrices that
    `zoo.train.muon` orthogonalizes.

    It goes by the owner: the field `weight` of an `AbstractLinear`, unless a dim is a vocabulary or classes. Tables,
    convolutions, decay rates and vectors per head have other owners, whatever their number of dims.
    """
    return map_leaves(_is_linear, params)


def matrix_mask(params: PyTree) -> PyTree:
    """Return True for every matrix that maps hidden features to hidden features, in a linear layer or in a module of
    your own: the parameters of Shampoo.

    Each layer and each expert of a stack counts as a separate matrix. Embeddings, heads of a vocabulary or of classes,
    and convolutions are excluded: Muon leaves them to Adam (Jordan, kellerjordan.github.io/posts/muon), with biases,
    norm scales and fields declared `zoo.parallel.no_weight_decay()`. As optax takes it:

        def number_dims(params):
            number = lambda is_matrix: optax.contrib.MuonDimensionNumbers(-1, -2) if is_matrix else None
            return jax.tree.map(number, train.matrix_mask(params))

        optax.contrib.muon(schedule, muon_weight_dimension_numbers=number_dims)
    """
    return map_leaves(_is_matrix, params)


def decay_mask(params: PyTree) -> PyTree:
    """Return True for matrices, embeddings and convolutions: the weight decay mask, `optax.adamw(schedule,
    mask=train.decay_mask)`.

    Biases, norm scales, decay rates (Mamba's A_log), vectors of a head (RWKV's bonus) and register tokens are excluded:
    arrays with fewer than two dims in one layer, and arrays declared `zoo.parallel.no_weight_decay()`.
    """
    return map_leaves(_decays, params)


def _decays(leaf: Leaf, x: Any) -> bool:
    dims = leaf.unstacked_dims
    ndim = x.ndim if dims is None else len(dims)
    return ndim >= 2 and not leaf.no_weight_decay


def _is_linear(leaf: Leaf, x: Any) -> bool:
    is_weight = leaf.owner is not None and issubclass(leaf.owner, AbstractLinear) and leaf.field == "weight"
    return is_weight and _is_matrix(leaf, x)


def _is_matrix(leaf: Leaf, x: Any) -> bool:
    dims = leaf.unstacked_dims
    if dims is None:
        return x.ndim == 2
    return _decays(leaf, x) and len(dims) == 2 and not any(dim.name in _NOT_FEATURES for dim in dims)
