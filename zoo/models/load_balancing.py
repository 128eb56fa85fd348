"""How evenly a mixture's experts are used: as numbers, as a loss, and by moving what routers choose with."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from zoo.layers import MixtureOfExperts, Routing
from zoo.parallel import reduce, trainable

from .parameter_paths import list_parameter_paths

BalanceOver = Literal["batch", "row", "layers"]


def tokens_per_expert(routing: Routing, mask: Bool[Array, "batch seq"] | None = None) -> Float[Array, "choices"]:
    """How many of the tokens that are here went to each expert; a token goes to `top` of them.

    In a loss on a mesh these are a device's own: return them as `aux`, and `zoo.value_and_grad` adds them up.
    `real` leaves out padding.
    """
    return _count_row_tokens_per_expert(routing, mask).sum(0)


def _count_row_tokens_per_expert(
    routing: Routing, mask: Bool[Array, "batch seq"] | None
) -> Float[Array, "batch choices"]:
    hits = (routing.chosen[..., None] == jnp.arange(routing.logits.shape[-1])).sum(2)
    return (hits if mask is None else jnp.where(mask[..., None], hits, 0)).sum(1).astype(jnp.float32)


def balance_loss(
    routing: Sequence[Routing],
    mask: Bool[Array, "batch seq"] | None = None,
    *,
    over: BalanceOver = "batch",
    score: Literal["softmax", "sigmoid"] = "softmax",
) -> Float[Array, ""]:
    """experts * Σ_e f_e P_e, with f_e the visits of expert e a token and P_e its mean score: `top` where all is even.

    - `routing`: what routers decided, one a layer, as it stands in the stream after the layers.
    - `over`: what f and P are means over before they are multiplied. "batch": all tokens, in each layer by itself
      (Switch, arXiv:2101.03961, equations 4 to 6). "row": one sequence by itself (DeepSeek-V3, arXiv:2412.19437,
      equations 17 to 20). "layers": all tokens and all layers, so that uneven layers may make up for one another: what
      transformers computes. The mean over layers and rows follows.
    - `score`: softmax(logits), or sigmoid(logits) divided by their sum.

    On a mesh the means are over all devices that split tokens, and the same as on one device. With micro-batches
    "batch" and "layers" take the means of each alone, which is another loss than that of the whole batch; "row" is the
    same where each has as many rows that are not all padding.
    """
    if not routing:
        raise ValueError("there is no router whose balance could be a loss: the model has no mixture of experts")
    both = [_sum_row_counts_and_scores(one, mask, score) for one in routing]
    used, liked = (jnp.stack(x) for x in zip(*both, strict=True))
    tokens = _count_row_tokens(routing[0], mask)
    if over == "row":
        own = jnp.maximum(tokens, 1)[:, None]
        rows = (used / own * liked / own).sum(-1).mean(0)
        product = _reduce_over_tokens(rows.sum()) / _reduce_over_tokens((tokens > 0).astype(jnp.float32).sum())
    else:
        count = _reduce_over_tokens(tokens.sum())
        used, liked = (_reduce_over_tokens(x.sum(1)) / count for x in (used, liked))
        if over == "layers":
            used, liked = used.mean(0), liked.mean(0)
        product = (used * liked).sum(-1).mean()
    return product * used.shape[-1]


def _sum_row_counts_and_scores(routing: Routing, mask: Any, score: str) -> tuple[Float[Array, "batch choices"], Array]:
    """Of each row: the visits of every expert, and the sum of its scores."""
    if score == "softmax":
        scores = jax.nn.softmax(routing.logits, axis=-1)
    else:
        raw = jax.nn.sigmoid(routing.logits)
        scores = raw / raw.sum(-1, keepdims=True)
    scores = scores if mask is None else jnp.where(mask[..., None], scores, 0)
    return _count_row_tokens_per_expert(routing, mask), scores.sum(1)


def _count_row_tokens(routing: Routing, mask: Bool[Array, "batch seq"] | None) -> Float[Array, "batch"]:
    here = jnp.ones_like(routing.logits[..., 0]) if mask is None else mask.astype(jnp.float32)
    return here.sum(1)


def _reduce_over_tokens(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The sum over all devices that split tokens."""
    return reduce(reduce(x, over="batch"), over="seq")


def router_z_loss(routing: Sequence[Routing], mask: Bool[Array, "batch seq"] | None = None) -> Float[Array, ""]:
    """The mean over tokens and layers of (log Σ_e exp(logit_e))²: keeps routers' scores small (ST-MoE, Zoph et al.,
    arXiv:2202.08906, equation 5)."""
    if not routing:
        raise ValueError("there is no router whose scores could be kept small: the model has no mixture of experts")
    squares = jnp.stack([jax.nn.logsumexp(one.logits, axis=-1) ** 2 for one in routing]).mean(0)
    squares = squares if mask is None else jnp.where(mask, squares, 0)
    return _reduce_over_tokens(squares.sum()) / _reduce_over_tokens(_count_row_tokens(routing[0], mask).sum())


def update_expert_bias(model: PyTree, loads: Sequence[Float[Array, "choices"]], *, rate: float | int = 1e-3) -> PyTree:
    """The model after its routers' selection biases moved by `rate` toward the experts that are used too little:
    b_e + rate sign(mean load - load_e) (Wang et al., arXiv:2408.15664, algorithm 1).

    `loads`: the `visits` of each layer that has a router, first to last, of the batch that was just learnt from.

    **Raises** `ValueError` where no router has a selection bias, and for another number of loads than of routers.
    """
    found = list_parameter_paths(model)
    scored = {n for place in found if ".router." in place.name for n in place.ranges[0]}
    order = {layer: i for i, layer in enumerate(sorted(scored))}
    if not any(_is_selection_bias(place.name) for place in found):
        raise ValueError("no router of this model chooses with a bias: make it with zoo.layers.BiasedRouter")
    if len(loads) != len(order):
        raise ValueError(f"{len(loads)} loads were given, and {len(order)} layers have a router")
    leaves, treedef = jax.tree.flatten(model)

    def moved(place: Any, x: Array) -> Array:
        if not _is_selection_bias(place.name):
            return x
        own = jnp.stack([loads[order[layer]] for layer in place.ranges[0]])
        return x + rate * jnp.sign(own.mean(-1, keepdims=True) - own).astype(x.dtype)

    return jax.tree.unflatten(treedef, list(map(moved, found, leaves)))


def _is_selection_bias(name: str) -> bool:
    return name.endswith(".router.selection_bias")


def count_active_parameters(model: PyTree) -> int:
    """How many learnt numbers one token meets: of experts the share that it is sent to. Of a model in shapes only, too.
    Embeddings count whole, as in `zoo.count`."""
    learnt = trainable(model)
    idle = 0
    for mixture in filter(_is_mixture, jax.tree.leaves(learnt, is_leaf=_is_mixture)):
        experts = mixture.router.scores.out_size
        size = sum(x.size for x in jax.tree.leaves(mixture.experts))
        idle += size // experts * (experts - mixture.router.top)
    return sum(x.size for x in jax.tree.leaves(learnt)) - idle


def _is_mixture(x: Any) -> bool:
    return isinstance(x, MixtureOfExperts)
