"""Routers: which experts a token goes to. Scores are computed in float32, whatever the rest is computed in."""

import abc
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.ops.moe.routing import biased_top_k, softmax_top_k, top_k_softmax
from zoo.parallel import Dim, Module, buffer, full_precision
from zoo.shapes import HiddenStates

from ..abstract import AbstractLinear
from ..linear import Linear
from .routing import Routing

_RoutingWeights = Float[Array, "batch seq top"]


class AbstractRouter(Module):
    """A score for each expert by a matrix, and a rule that makes of them a choice and its weights."""

    scores: eqx.AbstractVar[AbstractLinear]
    top: eqx.AbstractVar[int]

    @abc.abstractmethod
    def choose(self, logits: Float[Array, "batch seq choices"]) -> tuple[_RoutingWeights, Int[Array, "batch seq top"]]:
        """What each token's experts are weighted with, and which they are."""

    def __call__(self, x: HiddenStates) -> tuple[_RoutingWeights, Routing]:
        logits = self.scores(x.astype(jnp.float32))
        weights, chosen = self.choose(logits)
        return weights, Routing(logits, chosen)


class SoftmaxRouter(AbstractRouter):
    """The `top` largest of softmax(W x), divided by their sum with `renormalize`: see `zoo.ops.routing`."""

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
        """**Raises** `ValueError` where a token cannot go to so many experts."""
        check_routing_sizes(experts, top, groups, kept_groups)
        self.scores = _make_score_projection(embed, experts, bias, key)
        self.top, self.renormalize, self.scale = top, renormalize, float(scale)
        self.groups, self.kept_groups = groups, kept_groups

    def choose(self, logits: Float[Array, "batch seq choices"]) -> tuple[_RoutingWeights, Int[Array, "batch seq top"]]:
        how = {"scale": self.scale, "groups": self.groups, "kept_groups": self.kept_groups}
        return softmax_top_k(logits, self.top, renormalize=self.renormalize, **how)


class TopSoftmaxRouter(AbstractRouter):
    """softmax over the `top` largest of W x + b: see `zoo.ops.routing`."""

    scores: AbstractLinear = full_precision()

    top: int = eqx.field(static=True)

    def __init__(self, embed: int, experts: int, top: int, *, bias: bool = False, key: Key[Array, ""]):
        """**Raises** `ValueError` where a token cannot go to so many experts."""
        check_routing_sizes(experts, top, 1, 1)
        self.scores, self.top = _make_score_projection(embed, experts, bias, key), top

    def choose(self, logits: Float[Array, "batch seq choices"]) -> tuple[_RoutingWeights, Int[Array, "batch seq top"]]:
        return top_k_softmax(logits, self.top)


class BiasedRouter(AbstractRouter):
    """The experts whose score plus a bias is largest, weighted by their score alone: see `zoo.ops.routing`.

    The bias is no parameter: `zoo.models.rebalance` moves it against the load, and balance costs no gradient (Wang et
    al., arXiv:2408.15664). The score is sigmoid(W x) (DeepSeek-V3) or softmax(W x) (ERNIE 4.5).
    """

    scores: AbstractLinear = full_precision()
    selection_bias: Float[Array, "choices"] = buffer()

    top: int = eqx.field(static=True)
    score: Literal["sigmoid", "softmax"] = eqx.field(static=True)
    renormalize: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    kept_groups: int = eqx.field(static=True)
    smallest: float = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        experts: int,
        top: int,
        *,
        score: Literal["sigmoid", "softmax"] = "sigmoid",
        renormalize: bool = True,
        scale: float | int = 1.0,
        groups: int = 1,
        kept_groups: int = 1,
        smallest: float = 1e-20,
        key: Key[Array, ""],
    ):
        """**Raises** `ValueError` where a token cannot go to so many experts, and for another score."""
        check_routing_sizes(experts, top, groups, kept_groups)
        if score not in ("sigmoid", "softmax"):
            raise ValueError(f"a score is 'sigmoid' or 'softmax', not {score!r}")
        self.scores, self.selection_bias = _make_score_projection(embed, experts, False, key), jnp.zeros(experts)
        self.top, self.score, self.renormalize, self.scale = top, score, renormalize, float(scale)
        self.groups, self.kept_groups, self.smallest = groups, kept_groups, smallest

    def choose(self, logits: Float[Array, "batch seq choices"]) -> tuple[_RoutingWeights, Int[Array, "batch seq top"]]:
        scores = jax.nn.sigmoid(logits) if self.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        how = {"scale": self.scale, "groups": self.groups, "kept_groups": self.kept_groups, "smallest": self.smallest}
        bias = self.selection_bias.astype(jnp.float32)
        return biased_top_k(scores, bias, self.top, renormalize=self.renormalize, **how)


def _make_score_projection(embed: int, experts: int, bias: bool, key: Key[Array, ""]) -> Linear:
    """Its outputs are choices, not experts: of a mixture that is split, every device scores all of them."""
    return Linear(embed, experts, in_=Dim("embed"), out=Dim("choices"), bias=bias, key=key)


def check_routing_sizes(experts: int, top: int, groups: int, kept_groups: int) -> None:
    """**Raises** `ValueError` where a token cannot go to `top` of the experts in `kept_groups` of so many groups."""
    if not 1 <= top <= experts:
        raise ValueError(f"a token goes to at least 1 and at most all of {experts} experts, not {top}")
    if groups < 1 or experts % groups:
        raise ValueError(f"{experts} experts do not share out over {groups} groups")
    if not 1 <= kept_groups <= groups or top > kept_groups * (experts // groups):
        held = kept_groups * (experts // groups)
        raise ValueError(f"{kept_groups} of {groups} groups hold {held} experts, and a token goes to {top}")
