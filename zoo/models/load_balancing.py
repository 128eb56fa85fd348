"""Load balancing of mixtures of experts: tokens per expert, auxiliary losses, and loss-free bias updates."""

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
    """Count the tokens on this device that are routed to each expert; a token counts for each of its top-k experts.

    `mask` leaves out padding. To sum the counts over a mesh, return them from a loss as `aux`: `zoo.value_and_grad`
    all-reduces it.
    """
    return _count_row_tokens_per_expert(routing, mask).sum(0)


def _count_row_tokens_per_expert(
    routing: Routing, mask: Bool[Array, "batch seq"] | None
) -> Float[Array, "batch choices"]:
    one_hot_sum = (routing.chosen[..., None] == jnp.arange(routing.logits.shape[-1])).sum(2)
    masked = one_hot_sum if mask is None else jnp.where(mask[..., None], one_hot_sum, 0)
    return masked.sum(1).astype(jnp.float32)


def balance_loss(
    routing: Sequence[Routing],
    mask: Bool[Array, "batch seq"] | None = None,
    *,
    over: BalanceOver = "batch",
    score: Literal["softmax", "sigmoid"] = "softmax",
) -> Float[Array, ""]:
    """Load-balancing auxiliary loss: experts * Σ_e f_e P_e, with f_e the tokens per expert e as a fraction of all
    tokens, and P_e the mean score of e. A uniform load gives k, the number of experts per token.

    - `routing`: decisions of the routers, one per layer, as in `Hidden.routing`.
    - `over`: the set over which f and P are means before they are multiplied. "batch": all tokens of a layer (Switch,
      arXiv:2101.03961, equations 4 to 6). "row": one sequence (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20).
      "layers": all tokens and all layers, so that uneven layers can compensate for each other, as in transformers. The
      loss is then the mean over layers and rows.
    - `score`: softmax(logits), or sigmoid(logits) divided by their sum.

    On a mesh, means are over all devices that shard tokens, equal to those on one device. With micro-batches, "batch"
    and "layers" are means over each micro-batch, which is another loss than that of the full batch; "row" is the same
    if each micro-batch has as many rows that are not all padding.

    **Raises** `ValueError` for an empty `routing`.
    """
    if not routing:
        raise ValueError("there is no router whose balance could be a loss: the model has no mixture of experts")
    pairs = [_sum_row_counts_and_scores(layer, mask, score) for layer in routing]
    counts, scores = (jnp.stack(x) for x in zip(*pairs, strict=True))
    tokens = _count_row_tokens(routing[0], mask)
    if over == "row":
        row_tokens = jnp.maximum(tokens, 1)[:, None]
        row_products = (counts / row_tokens * scores / row_tokens).sum(-1).mean(0)
        num_rows = _reduce_over_tokens((tokens > 0).astype(jnp.float32).sum())
        product = _reduce_over_tokens(row_products.sum()) / num_rows
    else:
        num_tokens = _reduce_over_tokens(tokens.sum())
        counts, scores = (_reduce_over_tokens(x.sum(1)) / num_tokens for x in (counts, scores))
        if over == "layers":
            counts, scores = counts.mean(0), scores.mean(0)
        product = (counts * scores).sum(-1).mean()
    return product * counts.shape[-1]


def _sum_row_counts_and_scores(routing: Routing, mask: Any, score: str) -> tuple[Float[Array, "batch choices"], Array]:
    """Return tokens per expert and the sum of scores per expert, of each row."""
    if score == "softmax":
        scores = jax.nn.softmax(routing.logits, axis=-1)
    else:
        unnormalized = jax.nn.sigmoid(routing.logits)
        scores = unnormalized / unnormalized.sum(-1, keepdims=True)
    scores = scores if mask is None else jnp.where(mask[..., None], scores, 0)
    return _count_row_tokens_per_expert(routing, mask), scores.sum(1)


def _count_row_tokens(routing: Routing, mask: Bool[Array, "batch seq"] | None) -> Float[Array, "batch"]:
    is_token = jnp.ones_like(routing.logits[..., 0]) if mask is None else mask.astype(jnp.float32)
    return is_token.sum(1)


def _reduce_over_tokens(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """All-reduce over the devices that shard tokens."""
    return reduce(reduce(x, over="batch"), over="seq")


def router_z_loss(routing: Sequence[Routing], mask: Bool[Array, "batch seq"] | None = None) -> Float[Array, ""]:
    """Router z-loss: the mean over tokens and layers of (log Σ_e exp(logit_e))², which keeps router logits small
    (ST-MoE, Zoph et al., arXiv:2202.08906, equation 5).

    **Raises** `ValueError` for an empty `routing`.
    """
    if not routing:
        raise ValueError("there is no router whose scores could be kept small: the model has no mixture of experts")
    squares = jnp.stack([jax.nn.logsumexp(layer.logits, axis=-1) ** 2 for layer in routing]).mean(0)
    squares = squares if mask is None else jnp.where(mask, squares, 0)
    return _reduce_over_tokens(squares.sum()) / _reduce_over_tokens(_count_row_tokens(routing[0], mask).sum())


def update_expert_bias(model: PyTree, loads: Sequence[Float[Array, "choices"]], *, rate: float | int = 1e-3) -> PyTree:
    """Auxiliary-loss-free load balancing: move the selection bias of every router by `rate` toward underused experts,
    b_e + rate sign(mean load - load_e) (Wang et al., arXiv:2408.15664, algorithm 1).

    `loads`: `tokens_per_expert` of each layer that has a router, in order, over the batch of this training step.

    **Raises** `ValueError` if no router has a selection bias, and unless there is one load per router.
    """
    paths = list_parameter_paths(model)
    routed_layers = {layer for path in paths if ".router." in path.name for layer in path.ranges[0]}
    load_index = {layer: i for i, layer in enumerate(sorted(routed_layers))}
    if not any(_is_selection_bias(path.name) for path in paths):
        raise ValueError("no router of this model chooses with a bias: make it with zoo.layers.BiasedRouter")
    if len(loads) != len(load_index):
        raise ValueError(f"{len(loads)} loads were given, and {len(load_index)} layers have a router")
    leaves, treedef = jax.tree.flatten(model)

    def update_bias(path: Any, x: Array) -> Array:
        if not _is_selection_bias(path.name):
            return x
        load = jnp.stack([loads[load_index[layer]] for layer in path.ranges[0]])
        return x + rate * jnp.sign(load.mean(-1, keepdims=True) - load).astype(x.dtype)

    return jax.tree.unflatten(treedef, list(map(update_bias, paths, leaves)))


def _is_selection_bias(name: str) -> bool:
    return name.endswith(".router.selection_bias")


def count_active_parameters(model: PyTree) -> int:
    """Count the trainable parameters that are active per token: of the routed experts, only the top-k.

    All rows of embeddings count, as in `zoo.count`. `model` may be a tree of `jax.ShapeDtypeStruct`.
    """
    parameters = trainable(model)
    inactive = 0
    for mixture in filter(_is_mixture, jax.tree.leaves(parameters, is_leaf=_is_mixture)):
        experts = mixture.router.scores.out_size
        size = sum(x.size for x in jax.tree.leaves(mixture.experts))
        inactive += size // experts * (experts - mixture.router.top)
    return sum(x.size for x in jax.tree.leaves(parameters)) - inactive


def _is_mixture(x: Any) -> bool:
    return isinstance(x, MixtureOfExperts)
