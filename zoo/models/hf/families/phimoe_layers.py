"""Layers of Phi-3.5-MoE: a router with SparseMixer."""

import equinox as eqx
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractLinear
from zoo.layers.moe.router import AbstractRouter, RoutingWeights, check_routing_sizes, make_score_projection
from zoo.ops.moe.routing import sparse_mixer
from zoo.parallel import full_precision


class SparseMixerRouter(AbstractRouter):
    """Top 2 of W x, each weighted by a softmax over the experts near it (GRIN, arXiv:2409.12136): see
    `zoo.ops.moe.routing.sparse_mixer`. Experts are chosen as at inference, in training too."""

    scores: AbstractLinear = full_precision()

    top: int = eqx.field(static=True)
    jitter: float = eqx.field(static=True)

    def __init__(self, embed: int, experts: int, top: int = 2, *, jitter: float = 0.01, key: Key[Array, ""]):
        """`jitter`: half the relative distance within which experts are near. **Raises** `ValueError` for another `top`
        than 2, and for fewer experts."""
        check_routing_sizes(experts, top, 1, 1)
        if top != 2:
            raise ValueError(f"SparseMixer chooses 2 experts, not {top}")
        self.scores = make_score_projection(embed, experts, False, key)
        self.top = top
        self.jitter = float(jitter)

    def choose(self, logits: Float[Array, "batch seq choices"]) -> tuple[RoutingWeights, Int[Array, "batch seq top"]]:
        return sparse_mixer(logits, self.jitter)
