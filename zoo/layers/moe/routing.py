"""Routing decisions, which a model returns for load-balancing losses and plots."""

from jaxtyping import Array, Float, Int

from zoo.parallel import Module


class Routing(Module):
    """Router logits and expert indices of one mixture-of-experts layer, row first."""

    logits: Float[Array, "batch seq choices"]
    """Router logits of all experts in float32, before any softmax."""
    chosen: Int[Array, "batch seq top"]
    """Indices of the top-k experts of each token."""
