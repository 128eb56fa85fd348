"""Hyperparameters that transfer over widths: maximal update parametrization (muP) for Adam, from dims and a base model.

    base = jax.eval_shape(lambda: make(embed=128))           # the width at which the learning rate was tuned
    model = train.transfer_width(make(embed=1024), base)     # initial values, multiplier of logits, scale of scores
    optimizer = optax.chain(
        optax.scale_by_adam(), train.scale_by_width(base), optax.add_decayed_weights(0.1), optax.scale(-rate)
    )

At the base width nothing changes. Source: Yang et al., Tensor Programs V, arXiv:2203.03466, tables 3 and 8, appendix
B.1.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

from zoo.layers import AbstractLinear, AbstractMixer
from zoo.layers.embedding import AbstractEmbedding, AbstractPositionEmbedding
from zoo.models import Decoder
from zoo.models.targets import is_linear_site
from zoo.parallel import leaves
from zoo.parallel.module import Leaf, map_leaves, replace_option, trainable

_Model = TypeVar("_Model")


class WidthFactors(NamedTuple):
    """Factors of each parameter, in trees of floats like the parameters."""

    rates: PyTree[float]
    """Factors of the learning rate."""
    init: PyTree[float]
    """Factors of the initial values."""


def width_factors(params: PyTree, base: PyTree) -> WidthFactors:
    """Return the factors of learning rates and initial values that make a model train as its `base` does.

    Of the initializers of `zoo.layers.Linear` (standard deviation 1 / sqrt(in)) and `build_decoder` (embeddings
    1 / sqrt(embed)), with m = in / base in for a linear layer, embed / base embed for a table:

    | parameter | initial values | learning rate |
    |---|---|---|
    | linear, in and out grow with the width | 1 | 1 / m |
    | linear, only in grows: heads, routers | 1 / sqrt(m) | 1 / m |
    | linear, in does not grow | 1 | 1 |
    | embeddings of tokens and positions | sqrt(m) | 1 |
    | all others: norms, biases, convolutions, decay rates | 1 | 1 |

    - `params`: `zoo.trainable(model)`; `base`: a model of the same structure and of the base width, or its trainable
      parameters, of arrays or of `jax.ShapeDtypeStruct`s.

    **Raises** `ValueError` for a base with other parameters, or other numbers of layers or experts.
    """
    sizes = {leaf.name: x.shape for leaf, x in _list_parameters(base)}

    def look_up(leaf: Leaf) -> tuple[int, ...]:
        if leaf.name not in sizes:
            raise ValueError(
                f"the base model has no {leaf.name}: let it be the same model with other sizes of embed, heads and mlp"
            )
        return sizes[leaf.name]

    rates = map_leaves(lambda leaf, x: _compute_rate(leaf, x.shape, look_up(leaf)), params)
    init = map_leaves(lambda leaf, x: _compute_init(leaf, x.shape, look_up(leaf)), params)
    return WidthFactors(rates, init)


def scale_by_width(base: PyTree) -> optax.GradientTransformation:
    """Multiply updates by the `rates` of `width_factors`. In a chain it follows Adam's scaling and precedes the decay
    of weights, which then does not depend on the width."""

    def update(updates: PyTree, params: PyTree) -> PyTree:
        return jax.tree.map(lambda factor, x: factor * x, width_factors(updates, base).rates, updates)

    return optax.stateless(update)


def transfer_width(model: _Model, base: PyTree) -> _Model:
    """Return a model from scratch with the initial values, scale of scores and logits of muP.

    Initial values are multiplied by the `init` of `width_factors`; logits of a tied head by base embed / embed; scores
    of attention by sqrt(base head_dim / head_dim), so they are products over head_dim and not over its root.

    **Raises** `ValueError` as `width_factors` does, and `NotImplementedError` for a mixer with heads of another size
    than the base's that has no `scale`: let the number of heads grow instead.
    """
    parameters = trainable(model)
    factors = width_factors(parameters, base).init
    scaled = jax.tree.map(lambda factor, x: (factor * x).astype(x.dtype), factors, parameters)
    model = eqx.combine(scaled, model)
    mixers, treedef = jax.tree.flatten(model, is_leaf=_is_mixer)
    base_mixers = jax.tree.leaves(base, is_leaf=_is_mixer)
    model = jax.tree.unflatten(treedef, list(map(_scale_scores, mixers, base_mixers)))
    if isinstance(model, Decoder) and model.head is None:
        ratio = base.embedding.table_shape[1] / model.embedding.table_shape[1]
        model = replace_option(model, "logits_multiplier", model.logits_multiplier * ratio)
    return model


def _list_parameters(tree: PyTree) -> Iterator[tuple[Leaf, Any]]:
    return zip(leaves(tree), jax.tree.leaves(tree), strict=True)


def _compute_rate(leaf: Leaf, shape: tuple[int, ...], base: tuple[int, ...]) -> float:
    if _is_weight_of(leaf, AbstractLinear):
        return base[-1] / shape[-1]
    return 1.0


def _compute_init(leaf: Leaf, shape: tuple[int, ...], base: tuple[int, ...]) -> float:
    growth = shape[-1] / base[-1] if shape else 1.0
    if _is_weight_of(leaf, AbstractLinear) and shape[-2] == base[-2]:
        return growth**-0.5
    if _is_weight_of(leaf, AbstractEmbedding) or _is_weight_of(leaf, AbstractPositionEmbedding):
        return growth**0.5
    return 1.0


def _is_weight_of(leaf: Leaf, kind: type) -> bool:
    return leaf.owner is not None and issubclass(leaf.owner, kind) and leaf.field == "weight"


def _is_mixer(node: Any) -> bool:
    return isinstance(node, AbstractMixer)


def _scale_scores(mixer: Any, base: Any) -> Any:
    """Set the scale of attention for heads of another size than the base's. Return anything else as it is."""
    if not _is_mixer(mixer) or _list_head_sizes(mixer) == _list_head_sizes(base):
        return mixer
    if not hasattr(mixer, "scale") or not hasattr(mixer, "head_dim"):
        raise NotImplementedError(
            f"{type(mixer).__name__} has heads of other sizes than in the base model, and no scale of its scores that "
            "could follow: keep the size of a head, and let their number grow with the width"
        )
    scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
    return replace_option(mixer, "scale", scale * math.sqrt(base.head_dim / mixer.head_dim))


def _list_head_sizes(mixer: AbstractMixer) -> list[int]:
    """Return the elements of a head in the outputs of each linear layer, in order; 1 for outputs without heads."""
    linears = jax.tree.leaves(mixer, is_leaf=is_linear_site)
    return [linear.out.unit for linear in linears if is_linear_site(linear)]
