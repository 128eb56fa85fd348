"""Mixture of experts beside an MLP, each with norms of its own."""

from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import Array, Key

from zoo.layers import AbstractFeedForward, AbstractMixture, AbstractNorm, AbstractRouter, Routing
from zoo.layers.moe.exchange import mix_experts
from zoo.ops.moe.grouped_matmul import GROUPED_MATMUL
from zoo.parallel import implementation_option, reduce, stacked
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
