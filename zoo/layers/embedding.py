"""From token ids to vectors, and back."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.parallel import Module, offset, reduce, shares

from .linear import contract, truncated_normal


class Embedding(Module):
    """Row `token` of a table. `transposed` gives the logits of a head tied to it.

    Where the vocabulary is split, each device looks up the ids that it holds, and the sum brings the rest.
    """

    weight: Float[Array, "vocab embed"]

    def __init__(self, vocab: int, embed: int, *, scale: float = 1.0, key: Key[Array, ""]):
        """Normal numbers, cut off at two standard deviations, with a standard deviation of `scale`."""
        self.weight = truncated_normal(key, (vocab, embed), scale)

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """An id outside the vocabulary gives NaN, on one device and on any mesh."""
        size = self.weight.shape[0]
        local = tokens - offset(self.weight, "vocab", size)
        here = (0 <= local) & (local < size)
        rows = jnp.where(here[..., None], self.weight[jnp.where(here, local, 0)], 0)
        known = (0 <= tokens) & (tokens < size * shares(self.weight, "vocab"))
        return jnp.where(known[..., None], reduce(rows, over="vocab"), jnp.nan)

    def transposed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        """Wx: how much each row of the table points along x."""
        return contract(x, self.weight, 1)
