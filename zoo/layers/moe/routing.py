"""What routers decided about the tokens of a batch: a value that leaves the model, to be looked at and learnt from."""

from jaxtyping import Array, Float, Int

from zoo.parallel import Module


class Routing(Module):
    """The decisions of one router, row first. What a loss, a plot or a balance needs follows from them."""

    logits: Float[Array, "batch seq choices"]
    """Its scores of all experts, before any softmax, in float32."""
    chosen: Int[Array, "batch seq top"]
    """The experts that each token goes to."""
