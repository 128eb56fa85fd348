"""Layer of Nemotron-H: a mixture of experts that read a projection of the residual stream."""

from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import Array, Key

from zoo.layers import AbstractFeedForward, AbstractLinear, Linear
from zoo.layers.moe.exchange import mix_experts
from zoo.layers.moe.mixture import AbstractMixture
from zoo.layers.moe.router import AbstractRouter
from zoo.layers.moe.routing import Routing
from zoo.ops.moe.grouped_matmul import GROUPED_MATMUL
from zoo.parallel import Dim, implementation_option, reduce, stacked
from zoo.shapes import HiddenStates, ResidualStream


class LatentMixture(AbstractFeedForward, AbstractMixture):
    """y = S(x) + W_up Σ_e w_e E_e(W_down x) over the top-k experts e that the router chose for x: experts work in a
    latent space narrower than x, and the router and the shared expert S do not (NVIDIA, "Nemotron 3", 2025).

    Experts are dropless and sharded as in `zoo.layers.MixtureOfExperts`. Their output is all-reduced while it is
    narrow.
    """

    router: AbstractRouter
    down: AbstractLinear
    experts: AbstractFeedForward = stacked("experts")
    up: AbstractLinear
    shared: AbstractFeedForward

    implementation: str = implementation_option(GROUPED_MATMUL)

    def __init__(
        self,
        router: Callable[..., AbstractRouter],
        expert: Callable[..., AbstractFeedForward],
        experts: int,
        *,
        embed: int,
        latent: int,
        shared: Callable[..., AbstractFeedForward],
        bias: bool = False,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """`router`, `expert` and `shared` are factories, called with `key=`, `expert` once per expert. An expert maps
        `latent` channels to as many. `bias`: of W_down and W_up."""
        router_key, down_key, experts_key, up_key, shared_key = jax.random.split(key, 5)
        embed_dim = Dim("embed")
        latent_dim = Dim("latent")
        self.router = router(key=router_key)
        self.down = Linear(embed, latent, in_=embed_dim, out=latent_dim, bias=bias, key=down_key)
        self.experts = eqx.filter_vmap(lambda key: expert(key=key))(jax.random.split(experts_key, experts))
        self.up = Linear(latent, embed, in_=latent_dim, out=embed_dim, bias=bias, scale=out_scale, key=up_key)
        self.shared = shared(key=shared_key)
        self.implementation = implementation

    def __call__(self, x: HiddenStates) -> tuple[ResidualStream, tuple[Routing, ...]]:
        weights, routing = self.router(x)
        latents = self.down(x)
        flatten = lambda x: x.reshape(-1, x.shape[-1])
        tokens = flatten(latents), flatten(weights), flatten(routing.chosen)
        mixed = mix_experts(self.experts, *tokens, routing.logits.shape[-1], self.implementation)
        mixed = reduce(mixed.reshape(latents.shape), over="mlp", into="tokens")
        fed, _ = self.shared(x)
        return self.up(mixed) + fed, (routing,)
