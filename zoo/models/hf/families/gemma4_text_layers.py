"""Layers of Gemma 4: a mixture of experts beside an MLP, each with norms of its own, and its router."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractFeedForward, AbstractLinear, AbstractNorm
from zoo.layers.moe.exchange import mix_experts
from zoo.layers.moe.mixture import AbstractMixture
from zoo.layers.moe.router import AbstractRouter, RoutingWeights, check_routing_sizes, make_score_projection
from zoo.layers.moe.routing import Routing
from zoo.ops.moe.grouped_matmul import GROUPED_MATMUL
from zoo.ops.moe.routing import softmax_top_k
from zoo.parallel import full_precision, implementation_option, reduce, stacked
from zoo.shapes import HiddenStates, ResidualStream


class MixtureBesideMLP(AbstractFeedForward, AbstractMixture):
    """y = norm(D(norm(x))) + norm(Σ_e w_e E_e(norm(x))) over the top-k experts e that the router chose for
    norm(x) / sqrt(embed), with five norms (Gemma team, "Gemma 4", 2026).

    D is a dense MLP that every token uses. `x` is the residual stream: the block around it leaves its own norm out.
    Experts are dropless and sharded as in `zoo.layers.MixtureOfExperts`.
    """

    dense_norm: AbstractNorm
    dense: AbstractFeedForward
    dense_post_norm: AbstractNorm
    router_norm: AbstractNorm
    router: AbstractRouter
    experts_norm: AbstractNorm
    experts: AbstractFeedForward = stacked("experts")
    experts_post_norm: AbstractNorm

    implementation: str = implementation_option(GROUPED_MATMUL)

    def __init__(
        self,
        dense: Callable[..., AbstractFeedForward],
        router: Callable[..., AbstractRouter],
        expert: Callable[..., AbstractFeedForward],
        experts: int,
        norm: Callable[[], AbstractNorm],
        *,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """`dense`, `router` and `expert` are factories, called with `key=`, `expert` once per expert; `norm` is one of
        each norm."""
        dense_key, router_key, experts_key = jax.random.split(key, 3)
        self.dense = dense(key=dense_key)
        self.router = router(key=router_key)
        self.experts = eqx.filter_vmap(lambda key: expert(key=key))(jax.random.split(experts_key, experts))
        self.dense_norm = norm()
        self.router_norm = norm()
        self.experts_norm = norm()
        self.dense_post_norm = norm()
        self.experts_post_norm = norm()
        self.implementation = implementation

    def __call__(self, x: HiddenStates) -> tuple[ResidualStream, tuple[Routing, ...]]:
        weights, routing = self.router(self.router_norm(x) * x.shape[-1] ** -0.5)
        flatten = lambda x: x.reshape(-1, x.shape[-1])
        tokens = flatten(self.experts_norm(x)), flatten(weights), flatten(routing.chosen)
        mixed = mix_experts(self.experts, *tokens, routing.logits.shape[-1], self.implementation)
        mixed = reduce(mixed.reshape(x.shape), over="mlp", into="tokens")
        fed, _ = self.dense(self.dense_norm(x))
        return self.dense_post_norm(fed) + self.experts_post_norm(mixed), (routing,)


class ScaledSoftmaxRouter(AbstractRouter):
    """Top-k of softmax(W x), divided by their sum, each times a learned scale of its expert (Gemma team, "Gemma 4",
    2026)."""

    scores: AbstractLinear = full_precision()
    expert_scale: Float[Array, "choices"]

    top: int = eqx.field(static=True)

    def __init__(self, embed: int, experts: int, top: int, *, key: Key[Array, ""]):
        """**Raises** `ValueError` if `top` exceeds the number of experts."""
        check_routing_sizes(experts, top, 1, 1)
        self.scores = make_score_projection(embed, experts, False, key)
        self.top = top
        self.expert_scale = jnp.ones(experts, jnp.float32)

    def choose(self, logits: Float[Array, "batch seq choices"]) -> tuple[RoutingWeights, Int[Array, "batch seq top"]]:
        weights, chosen = softmax_top_k(logits, self.top, renormalize=True)
        return weights * self.expert_scale.astype(jnp.float32)[chosen], chosen
