"""Bias of the output of a mixture of experts."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.parallel.tokens import shard_tokens
from zoo.shapes import HiddenStates, ResidualStream

from ..abstract import AbstractFeedForward


class OutputBias(AbstractFeedForward):
    """y = b for every token. As the `shared` expert of a `zoo.layers.MixtureOfExperts` it is the bias of the mixture's
    output (JetMoE, arXiv:2404.07413)."""

    bias: Float[Array, "embed"]

    def __init__(self, embed: int, *, key: Key[Array, ""] | None = None):
        """Initialize with zeros; the `key` is not used."""
        self.bias = jnp.zeros(embed, jnp.float32)

    def __call__(self, x: HiddenStates) -> tuple[ResidualStream, tuple[()]]:
        return shard_tokens(jnp.broadcast_to(self.bias, x.shape)), ()
