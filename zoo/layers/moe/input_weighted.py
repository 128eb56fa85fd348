"""Mixture of experts whose routing weights scale the inputs of experts."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from zoo.ops.moe.grouped_matmul import GROUPED_MATMUL
from zoo.parallel import implementation_option, reduce, stacked
from zoo.shapes import HiddenStates, ResidualStream

from ..abstract import AbstractFeedForward
from .exchange import mix_experts
from .mixture import AbstractMixture
from .router import AbstractRouter
from .routing import Routing


class InputWeightedMixture(AbstractFeedForward, AbstractMixture):
    """y = S(x) + Σ_e E_e(w_e x) over the top-k experts e that the router chose for x (Meta, "Llama 4", 2025). Without a
    `shared` expert, S(x) is omitted.

    Each choice of a token is a row of its own, which goes to one expert and comes back with weight 1. Experts are
    dropless and sharded as in `zoo.layers.MixtureOfExperts`.
    """

    router: AbstractRouter
    experts: AbstractFeedForward = stacked("experts")
    shared: AbstractFeedForward | None

    implementation: str = implementation_option(GROUPED_MATMUL)

    def __init__(
        self,
        router: Callable[..., AbstractRouter],
        expert: Callable[..., AbstractFeedForward],
        experts: int,
        *,
        shared: Callable[..., AbstractFeedForward] | None = None,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """`router`, `expert` and `shared` are factories, called with `key=`, `expert` once per expert."""
        router_key, experts_key, shared_key = jax.random.split(key, 3)
        self.router = router(key=router_key)
        self.experts = eqx.filter_vmap(lambda key: expert(key=key))(jax.random.split(experts_key, experts))
        self.shared = None if shared is None else shared(key=shared_key)
        self.implementation = implementation

    def __call__(self, x: HiddenStates) -> tuple[ResidualStream, tuple[Routing, ...]]:
        weights, routing = self.router(x)
        rows = (x[..., None, :] * weights[..., None].astype(x.dtype)).reshape(-1, x.shape[-1])
        choices = routing.chosen.reshape(-1, 1)
        ones = jnp.ones_like(weights.reshape(-1, 1))
        y = mix_experts(self.experts, rows, ones, choices, routing.logits.shape[-1], self.implementation)
        y = reduce(y.reshape(*weights.shape, -1).sum(-2), over="mlp", into="tokens")
        return y if self.shared is None else y + self.shared(x)[0], (routing,)
