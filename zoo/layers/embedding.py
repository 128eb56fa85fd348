"""From token ids to vectors, and back; and from positions to vectors."""

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.parallel import Module, num_shards, reduce, shard_offset
from zoo.shapes import HiddenStates

from .linear import contract, truncated_normal


class AbstractEmbedding(Module):
    """What stands where token ids become vectors: an `Embedding`, or what an adapter puts there."""

    multiplier: eqx.AbstractVar[float]

    @abc.abstractmethod
    def __call__(self, tokens: Int[Array, "batch seq"]) -> HiddenStates:
        """`multiplier` times the row of each token."""

    @abc.abstractmethod
    def transposed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        """W x: how much each row of the table points along x, which is the logits of a head tied to it."""

    @property
    @abc.abstractmethod
    def dense_weight(self) -> Float[Array, "vocab embed"]:
        """The table, in float32: of a device's share, its share."""

    @property
    def dense_bias(self) -> None:
        """None: there is no bias."""
        return None

    @abc.abstractmethod
    def with_weight(self, weight: Float[Array, "vocab embed"], bias: None = None) -> "AbstractEmbedding":
        """The same with another table."""

    @property
    @abc.abstractmethod
    def table_shape(self) -> tuple[int, int]:
        """How many rows the table has, and how long they are."""


class Embedding(AbstractEmbedding):
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

    def __call__(self, tokens: Int[Array, "batch seq"]) -> HiddenStates:
        """An id outside the vocabulary gives NaN, on one device and on any mesh."""
        found = lookup_rows(self.weight, tokens)
        return found if self.multiplier == 1 else found * self.multiplier

    def transposed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        return contract(x, self.weight, 1)

    @property
    def dense_weight(self) -> Float[Array, "vocab embed"]:
        return self.weight.astype(jnp.float32)

    def with_weight(self, weight: Float[Array, "vocab embed"], bias: None = None) -> "Embedding":
        return eqx.tree_at(lambda embedding: embedding.weight, self, weight)

    @property
    def table_shape(self) -> tuple[int, int]:
        vocab, embed = self.weight.shape
        return vocab, embed


def lookup_rows(table: Float[Array, "vocab size"], tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq size"]:
    """Rows of a table whose vocabulary may be split; NaN for an id outside it."""
    size = table.shape[0]
    local = tokens - shard_offset(table, "vocab", size)
    here = (0 <= local) & (local < size)
    rows = jnp.where(here[..., None], table[jnp.where(here, local, 0)], 0)
    known = (0 <= tokens) & (tokens < size * num_shards(table, "vocab"))
    return jnp.where(known[..., None], reduce(rows, over="vocab"), jnp.nan)


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
