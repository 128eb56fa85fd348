"""Top-k routers of mixture-of-experts layers. Router logits are computed in float32."""

import abc
from typing import Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from zoo.ops.moe.routing import biased_top_k, softmax_top_k, top_k_softmax
from zoo.parallel import Dim, Module, buffer, full_precision
from zoo.shapes import HiddenStates

from ..abstract import AbstractLinear
from ..linear import Linear
from .routing import Routing

RoutingWeights = Float[Array, "batch seq top"]
RouterScore = Literal["sigmoid", "softmax", "sqrt_softplus"]

_LEAST_SOFTPLUS = 1e-30
"""A square root has no gradient at 0, which softplus underflows to."""


class AbstractRouter(Module):
    """Router: logits W x over experts, from which `choose` picks the top-k and their weights."""

    scores: eqx.AbstractVar[AbstractLinear]
    top: eqx.AbstractVar[int]

    @abc.abstractmethod
    def choose(self, logits: Float[Array, "batch seq choices"]) -> tuple[RoutingWeights, Int[Array, "batch seq top"]]:
        """Return the weights and the indices of each token's experts."""

    def compute_logits(self, x: HiddenStates) -> Float[Array, "batch seq choices"]:
        """Return the logits of each token over all experts."""
        return self.scores(x.astype(jnp.float32))

    def __call__(self, x: HiddenStates) -> tuple[RoutingWeights, Routing]:
        logits = self.compute_logits(x)
        weights, chosen = self.choose(logits)
        return weights, Routing(logits, chosen)


class SoftmaxRouter(AbstractRouter):
    """Top-k of softmax(W x), divided by their sum if `renormalize`: see `zoo.ops.moe.routing`."""

    scores: AbstractLinear = full_precision()

    top: int = eqx.field(static=True)
    renormalize: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    kept_groups: int = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        experts: int,
        top: int,
        *,
        renormalize: bool = True,
        scale: float | int = 1.0,
        groups: int = 1,
        kept_groups: int = 1,
        bias: bool = False,
        key: Key[Array, ""],
    ):
        """**Raises** `ValueError` if `top` exceeds the number of experts or of those in the kept groups."""
        check_routing_sizes(experts, top, groups, kept_groups)
        self.scores = make_score_projection(embed, experts, bias, key)
        self.top = top
        self.renormalize = renormalize
        self.scale = float(scale)
        self.groups = groups
        self.kept_groups = kept_groups

    def choose(self, logits: Float[Array, "batch seq choices"]) -> tuple[RoutingWeights, Int[Array, "batch seq top"]]:
        options = {"scale": self.scale, "groups": self.groups, "kept_groups": self.kept_groups}
        return softmax_top_k(logits, self.top, renormalize=self.renormalize, **options)


class TopSoftmaxRouter(AbstractRouter):
    """Softmax over the top-k of W x + b: see `zoo.ops.moe.routing`."""

    scores: AbstractLinear = full_precision()

    top: int = eqx.field(static=True)

    def __init__(self, embed: int, experts: int, top: int, *, bias: bool = False, key: Key[Array, ""]):
        """**Raises** `ValueError` if `top` exceeds the number of experts or of those in the kept groups."""
        check_routing_sizes(experts, top, 1, 1)
        self.scores = make_score_projection(embed, experts, bias, key)
        self.top = top

    def choose(self, logits: Float[Array, "batch seq choices"]) -> tuple[RoutingWeights, Int[Array, "batch seq top"]]:
        return top_k_softmax(logits, self.top)


class SigmoidRouter(AbstractRouter):
    """Top-k of sigmoid(W x), divided by their sum if `renormalize`: see `zoo.ops.moe.routing`."""

    scores: AbstractLinear = full_precision()

    top: int = eqx.field(static=True)
    renormalize: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    smallest: float = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        experts: int,
        top: int,
        *,
        renormalize: bool = True,
        scale: float | int = 1.0,
        smallest: float = 1e-20,
        key: Key[Array, ""],
    ):
        """`smallest` is added to the sum that `renormalize` divides by.

        **Raises** `ValueError` if `top` exceeds the number of experts."""
        check_routing_sizes(experts, top, 1, 1)
        self.scores = make_score_projection(embed, experts, False, key)
        self.top = top
        self.renormalize = renormalize
        self.scale = float(scale)
        self.smallest = smallest

    def choose(self, logits: Float[Array, "batch seq choices"]) -> tuple[RoutingWeights, Int[Array, "batch seq top"]]:
        options = {"scale": self.scale, "renormalize": self.renormalize, "smallest": self.smallest}
        unbiased = jnp.zeros(logits.shape[-1], jnp.float32)
        return biased_top_k(jax.nn.sigmoid(logits), unbiased, self.top, **options)


class BiasedRouter(AbstractRouter):
    """Top-k of score + bias, weighted by the score only: see `zoo.ops.moe.routing`.

    The score is sigmoid(W x) (DeepSeek-V3), softmax(W x) (ERNIE 4.5) or sqrt(softplus(W x)) (DeepSeek-V4); a
    `soft_cap` c first bounds logits to c tanh(W x / c) (Laguna). The bias is a buffer, not a trainable parameter:
    `zoo.models.update_expert_bias` moves it against the load, which balances experts without an auxiliary loss (Wang et
    al., arXiv:2408.15664).
    """

    scores: AbstractLinear = full_precision()
    selection_bias: Float[Array, "choices"] = buffer()

    top: int = eqx.field(static=True)
    score: RouterScore = eqx.field(static=True)
    renormalize: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    kept_groups: int = eqx.field(static=True)
    smallest: float = eqx.field(static=True)
    soft_cap: float | None = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        experts: int,
        top: int,
        *,
        score: RouterScore = "sigmoid",
        renormalize: bool = True,
        scale: float | int = 1.0,
        groups: int = 1,
        kept_groups: int = 1,
        smallest: float = 1e-20,
        soft_cap: float | None = None,
        key: Key[Array, ""],
    ):
        """**Raises** `ValueError` if `top` exceeds the number of experts or of those in the kept groups, and for
        another score."""
        check_routing_sizes(experts, top, groups, kept_groups)
        check_score(score)
        self.scores = make_score_projection(embed, experts, False, key)
        self.selection_bias = jnp.zeros(experts, jnp.float32)
        self.top = top
        self.score = score
        self.renormalize = renormalize
        self.scale = float(scale)
        self.groups = groups
        self.kept_groups = kept_groups
        self.smallest = smallest
        self.soft_cap = soft_cap

    def compute_logits(self, x: HiddenStates) -> Float[Array, "batch seq choices"]:
        logits = super().compute_logits(x)
        if self.soft_cap is None:
            return logits
        return self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def choose(self, logits: Float[Array, "batch seq choices"]) -> tuple[RoutingWeights, Int[Array, "batch seq top"]]:
        scores = compute_scores(logits, self.score)
        options = {"scale": self.scale, "groups": self.groups, "kept_groups": self.kept_groups}
        options |= {"renormalize": self.renormalize, "smallest": self.smallest}
        return biased_top_k(scores, self.selection_bias.astype(jnp.float32), self.top, **options)


class HashRouter(AbstractRouter):
    """Experts by the id of a token, from a `table` that is not trained, weighted by their scores, divided by their sum
    (Roller et al., arXiv:2106.04426, section 3; with learned scores DeepSeek-V4, 2026, section 2.1).

    A block that knows the ids gives them to the router of its mixture: `zoo.models.layer_inputs.route_by_token`.
    """

    scores: AbstractLinear = full_precision()
    table: Int[Array, "in top"] = buffer()
    """Experts of each id of the vocabulary."""
    tokens: Int[Array, "batch seq"] | None
    """Ids of the tokens that are routed, in a block that runs; else None."""

    top: int = eqx.field(static=True)
    score: RouterScore = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    smallest: float = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        experts: int,
        top: int,
        *,
        vocab: int,
        score: RouterScore = "sigmoid",
        scale: float | int = 1.0,
        smallest: float = 1e-20,
        key: Key[Array, ""],
    ):
        """Draw a table of `vocab` rows of `top` different experts each. `score` and `smallest` are as in
        `BiasedRouter`.

        **Raises** `ValueError` if `top` exceeds the number of experts, and for another score."""
        check_routing_sizes(experts, top, 1, 1)
        check_score(score)
        score_key, table_key = jax.random.split(key)
        self.scores = make_score_projection(embed, experts, False, score_key)
        drawn = jax.random.uniform(table_key, (vocab, experts))
        self.table = lax.top_k(drawn, top)[1]
        self.tokens = None
        self.top = top
        self.score = score
        self.scale = float(scale)
        self.smallest = smallest

    def choose(self, logits: Float[Array, "batch seq choices"]) -> tuple[RoutingWeights, Int[Array, "batch seq top"]]:
        """**Raises** `ValueError` without the ids of the tokens."""
        if self.tokens is None:
            raise ValueError(
                "a HashRouter reads the ids of tokens, and its block does not have them: build the layers with "
                "make_hyper_connections(..., keeps_tokens=True), and run them in their model"
            )
        chosen = jnp.take(self.table, self.tokens, axis=0, mode="clip")
        weights = jnp.take_along_axis(compute_scores(logits, self.score), chosen, axis=-1)
        return weights / (weights.sum(-1, keepdims=True) + self.smallest) * self.scale, chosen


def compute_scores(logits: Float[Array, "batch seq choices"], score: RouterScore) -> Float[Array, "batch seq choices"]:
    """Return the scores of router logits, which are not negative."""
    if score == "sigmoid":
        return jax.nn.sigmoid(logits)
    if score == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    return jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), _LEAST_SOFTPLUS))


def check_score(score: str) -> None:
    """**Raises** `ValueError` for a score that no router has."""
    if score not in get_args(RouterScore):
        raise ValueError(f"a score is one of {', '.join(get_args(RouterScore))}, not {score!r}")


def make_score_projection(embed: int, experts: int, bias: bool, key: Key[Array, ""]) -> Linear:
    """Initialize the projection to router logits. Its output dim is "choices", not "experts", so that every device
    scores all experts of a sharded mixture."""
    return Linear(embed, experts, in_=Dim("embed"), out=Dim("choices"), bias=bias, key=key)


def check_routing_sizes(experts: int, top: int, groups: int, kept_groups: int) -> None:
    """**Raises** `ValueError` unless the `kept_groups` of `groups` equal groups hold at least `top` experts."""
    if not 1 <= top <= experts:
        raise ValueError(f"a token goes to at least 1 and at most all of {experts} experts, not {top}")
    if groups < 1 or experts % groups:
        raise ValueError(f"{experts} experts do not divide evenly over {groups} groups")
    if not 1 <= kept_groups <= groups or top > kept_groups * (experts // groups):
        available = kept_groups * (experts // groups)
        raise ValueError(f"{kept_groups} of {groups} groups hold {available} experts, and a token goes to {top}")
