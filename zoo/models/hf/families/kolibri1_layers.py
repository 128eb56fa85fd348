"""The router of Kolibri: top-k of logits with a selection bias, each weighted by its sigmoid."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractLinear
from zoo.layers.moe.router import AbstractRouter, RoutingWeights, check_routing_sizes, make_score_projection
from zoo.parallel import buffer, full_precision


class LogitBiasedRouter(AbstractRouter):
    """Top-k of W x + bias, weighted by sigmoid(W x), over their sum if `renormalize` (Aleph Alpha, "Kolibri 1", 2026).

    Where `zoo.layers.BiasedRouter` adds the bias to the sigmoid, this one adds it to the logit. The bias is a buffer,
    which `zoo.models.update_expert_bias` moves.
    """

    scores: AbstractLinear = full_precision()
    selection_bias: Float[Array, "choices"] = buffer()

    top: int = eqx.field(static=True)
    renormalize: bool = eqx.field(static=True)

    def __init__(self, embed: int, experts: int, top: int, *, renormalize: bool = False, key: Key[Array, ""]):
        """**Raises** `ValueError` if `top` exceeds the number of experts."""
        check_routing_sizes(experts, top, 1, 1)
        self.scores = make_score_projection(embed, experts, False, key)
        self.selection_bias = jnp.zeros(experts, jnp.float32)
        self.top = top
        self.renormalize = renormalize

    def choose(self, logits: Float[Array, "batch seq choices"]) -> tuple[RoutingWeights, Int[Array, "batch seq top"]]:
        biased = lax.stop_gradient(logits) + self.selection_bias.astype(jnp.float32)
        _, chosen = lax.top_k(biased, self.top)
        weights = jax.nn.sigmoid(jnp.take_along_axis(logits, chosen, axis=-1))
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdims=True)
        return weights, chosen
