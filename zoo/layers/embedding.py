"""From token ids to vectors, and back; and from positions to vectors."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.parallel import Module, offset, reduce, shares

from .linear import contract, truncated_normal


class Embedding(Module):
    """`multiplier` times row `token` of a table. `transposed` gives the logits of a head tied to it.

    Where the vocabulary is split, each device looks up the ids that it holds, and the sum brings the rest. The
    multiplier is rounded to the dtype of the table, as Gemma's is.
    """

    weight: Float[Array, "vocab embed"]

    multiplier: float = eqx.field(static=True)

    def __init__(
        self, vocab: int, embed: int, *, scale: float = 1.0, multiplier: float | int = 1.0, key: Key[Array, ""]
    ):
        """Normal numbers, cut off at two standard deviations, with a standard deviation of `scale`."""
        self.weight = truncated_normal(key, (vocab, embed), scale)
        self.multiplier = float(multiplier)

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """An id outside the vocabulary gives NaN, on one device and on any mesh."""
        size = self.weight.shape[0]
        local = tokens - offset(self.weight, "vocab", size)
        here = (0 <= local) & (local < size)
        rows = jnp.where(here[..., None], self.weight[jnp.where(here, local, 0)], 0)
        known = (0 <= tokens) & (tokens < size * shares(self.weight, "vocab"))
        found = jnp.where(known[..., None], reduce(rows, over="vocab"), jnp.nan)
        return found if self.multiplier == 1 else found * self.multiplier

    def transposed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        """Wx: how much each row of the table points along x."""
        return contract(x, self.weight, 1)


class PositionEmbedding(Module):
    """A learned vector for each position up to a longest one (Vaswani et al., arXiv:1706.03762, table 3, row E)."""

    weight: Float[Array, "positions embed"]

    def __init__(self, positions: int, embed: int, *, scale: float = 1.0, key: Key[Array, ""]):
        self.weight = truncated_normal(key, (positions, embed), scale)

    @property
    def length(self) -> int:
        """How many tokens a text may have."""
        return self.weight.shape[0]

    def __call__(self, positions: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Padding, at negative positions, gets the first vector; a position beyond the last gives NaN."""
        known = positions < self.length
        return jnp.where(known[..., None], self.weight[jnp.where(known, jnp.maximum(positions, 0), 0)], jnp.nan)
