"""Load balancing of mixtures of experts: tokens per expert, auxiliary losses, and loss-free bias updates."""

from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from zoo.layers.moe.mixture import AbstractMixture
from zoo.layers.moe.routing import RoutingSums
from zoo.parallel import reduce
from zoo.parallel.module import trainable

from .parameter_paths import ParameterPath, list_parameter_paths

BalanceOver = Literal["batch", "row", "layers"]


def tokens_per_expert(routing: RoutingSums) -> Float[Array, "choices"]:
    """Count the tokens on this device that are routed to each expert; a token counts for each of its top-k experts, and
    padding for none.

    To sum the counts over a mesh, return them from a loss as `aux`: `zoo.value_and_grad` all-reduces it.
    """
    return routing.visits.sum(0)


def balance_loss(
    routing: Sequence[RoutingSums], *, over: BalanceOver = "batch", score: Literal["softmax", "sigmoid"] = "softmax"
) -> Float[Array, ""]:
    """Load-balancing auxiliary loss: experts * Σ_e f_e P_e, with f_e the tokens per expert e as a fraction of all
    tokens, and P_e the mean score of e. A uniform load gives k, the number of experts per token. Padding is left out.

    - `routing`: sums of the routers' decisions, one per layer, as in `Hidden.routing`.
    - `over`: the set over which f and P are means before they are multiplied. "batch": all tokens of a layer (Switch,
      arXiv:2101.03961, equations 4 to 6). "row": one sequence (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20).
      "layers": all tokens and all layers, so that uneven layers can compensate for each other, as in transformers. The
      loss is then the mean over layers and rows.
    - `score`: softmax(logits), or sigmoid(logits) divided by their sum.

    On a mesh, means are over all devices that shard tokens, as on one device. With micro-batches, "batch" and "layers"
    are means over each micro-batch, which differs from the loss of the full batch; "row" is the same if each
    micro-batch has as many rows that are not all padding. GPipe on a mesh with `pipe` cuts the layers into
    micro-batches, and not the loss: there they are means over the full batch.

    **Raises** `ValueError` for an empty `routing`, and for another `over` or `score`.
    """
    if not routing:
        raise ValueError("no router to balance: the model has no mixture of experts")
    for value, names in ((over, get_args(BalanceOver)), (score, ("softmax", "sigmoid"))):
        if value not in names:
            raise ValueError(f"a balance loss knows {', '.join(names)}, not {value!r}")
    counts = jnp.stack([layer.visits for layer in routing])
    scores = jnp.stack([layer.softmax_scores if score == "softmax" else layer.sigmoid_scores for layer in routing])
    # f and P are multiplied, so each is first summed over all devices that hold tokens of its set.
    counts, scores, tokens = (reduce(x, over="seq") for x in (counts, scores, routing[0].num_tokens))
    if over == "row":
        row_tokens = jnp.maximum(tokens, 1)[:, None]
        row_products = (counts / row_tokens * scores / row_tokens).sum(-1).mean(0)
        num_rows = reduce((tokens > 0).astype(jnp.float32).sum(), over="batch")
        product = reduce(row_products.sum(), over="batch") / jnp.maximum(num_rows, 1)
    else:
        num_tokens = reduce(tokens.sum(), over="batch")
        num_tokens = jnp.maximum(num_tokens, 1)  # a micro-batch may be padding
        counts, scores = (reduce(x.sum(1), over="batch") / num_tokens for x in (counts, scores))
        if over == "layers":
            counts = counts.mean(0)
            scores = scores.mean(0)
        product = (counts * scores).sum(-1).mean()
    return product * counts.shape[-1]


def router_z_loss(routing: Sequence[RoutingSums]) -> Float[Array, ""]:
    """Router z-loss: the mean over tokens and layers of (log Σ_e exp(logit_e))², which keeps router logits small
    (ST-MoE, Zoph et al., arXiv:2202.08906, equation 5). Padding is left out.

    **Raises** `ValueError` for an empty `routing`.
    """
    if not routing:
        raise ValueError("no router to regularize: the model has no mixture of experts")
    squares = jnp.stack([layer.squared_log_z for layer in routing]).mean(0).sum()
    squares, num_tokens = (reduce(reduce(x, over="seq"), over="batch") for x in (squares, routing[0].num_tokens.sum()))
    return squares / jnp.maximum(num_tokens, 1)  # a micro-batch may be padding


def update_expert_bias(model: PyTree, loads: Sequence[Float[Array, "choices"]], *, rate: float | int = 1e-3) -> PyTree:
    """Auxiliary-loss-free load balancing: move the selection bias of every router by `rate` toward underused experts,
    b_e + rate sign(mean load - load_e) (Wang et al., arXiv:2408.15664, algorithm 1).

    `loads`: `tokens_per_expert` of each layer that has a router, in order, over the batch of this training step; the
    layers of `model.predictors` come last, or are left out if they are not trained.

    **Raises** `ValueError` if no router has a selection bias, and unless there is one load per router.
    """
    paths = list_parameter_paths(model)
    routed_layers = {layer for path in paths if ".router." in path.name for layer in _list_layers(path)}
    routed_layers -= {layer for path in paths if path.name.endswith(".router.table") for layer in _list_layers(path)}
    if len(loads) == sum(module < 0 for module, _ in routed_layers):
        routed_layers = {(module, layer) for module, layer in routed_layers if module < 0}
    load_index = {layer: i for i, layer in enumerate(sorted(routed_layers))}
    if not any(_is_selection_bias(path.name) for path in paths):
        raise ValueError("no router of this model chooses with a bias: make it with zoo.layers.BiasedRouter")
    if len(loads) != len(load_index):
        raise ValueError(f"{len(loads)} loads were given, and {len(load_index)} layers have a router")
    leaves, treedef = jax.tree.flatten(model)

    def update_bias(path: ParameterPath, x: Array) -> Array:
        if not _is_selection_bias(path.name):
            return x
        layers = _list_layers(path)
        if layers[0] not in load_index:
            return x
        load = jnp.stack([loads[load_index[layer]] for layer in layers]).reshape(x.shape)
        return x + rate * jnp.sign(load.mean(-1, keepdims=True) - load).astype(x.dtype)

    return jax.tree.unflatten(treedef, list(map(update_bias, paths, leaves)))


def _list_layers(path: ParameterPath) -> list[tuple[int, int]]:
    """Return the layers of a router's array: the number of their predictor, -1 in the model's stack, and their own."""
    if path.name.startswith("predictors."):
        _, module, _, layer, *_ = path.name.split(".")
        return [(int(module), int(layer))]
    return [(-1, layer) for layer in path.ranges[0]]


def _is_selection_bias(name: str) -> bool:
    return name.endswith(".router.selection_bias")


def count_active_parameters(model: PyTree) -> int:
    """Count the trainable parameters that are active per token at most: of the routed experts, only the top-k.

    All rows of embeddings count, as in `zoo.count`. `model` may be a tree of `jax.ShapeDtypeStruct`.
    """
    parameters = trainable(model)
    inactive = 0
    # The model's own routers say how many experts there are: beneath adapters, `parameters` lacks their weights.
    for mixture, trained in zip(_list_mixtures(model), _list_mixtures(parameters), strict=True):
        experts = mixture.num_experts
        size = sum(x.size for x in jax.tree.leaves(trained.experts))
        inactive += size // experts * max(experts - mixture.router.top, 0)
    return sum(x.size for x in jax.tree.leaves(parameters)) - inactive


def _list_mixtures(model: PyTree) -> list[AbstractMixture]:
    is_mixture = lambda x: isinstance(x, AbstractMixture)
    return list(filter(is_mixture, jax.tree.leaves(model, is_leaf=is_mixture)))
