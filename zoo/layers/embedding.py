"""Token embedding, tied head, and position embeddings: learned and sinusoidal."""

import abc
import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from zoo.parallel import Module, num_shards, reduce
from zoo.parallel.collectives import shard_offset
from zoo.parallel.tokens import shard_tokens
from zoo.shapes import ResidualStream, Tokens

from .linear import contract, truncated_normal


class AbstractEmbedding(Module):
    """Token embedding: an `Embedding`, or one wrapped by an adapter."""

    multiplier: eqx.AbstractVar[float]

    @abc.abstractmethod
    def __call__(self, tokens: Tokens) -> ResidualStream:
        """Look up the embedding of each token, times `multiplier`."""

    @abc.abstractmethod
    def transposed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        """Return W x: the logits of a tied head."""

    @property
    @abc.abstractmethod
    def dense_weight(self) -> Float[Array, "vocab embed"]:
        """Embedding table, dequantized to float32."""

    @property
    def dense_bias(self) -> Float[Array, "vocab"] | None:
        """Bias of the logits of a tied head, or None. An adapter has its base's."""
        return getattr(getattr(self, "base", None), "dense_bias", None)

    @abc.abstractmethod
    def with_weight(
        self, weight: Float[Array, "vocab embed"], bias: Float[Array, "vocab"] | None = None
    ) -> "AbstractEmbedding":
        """Return a copy with this table. `bias` is the bias of this embedding, which the copy keeps."""

    @property
    @abc.abstractmethod
    def table_shape(self) -> tuple[int, int]:
        """Shape (vocab, embed) of the table."""


class Embedding(AbstractEmbedding):
    """Token embedding: `multiplier` times row `token` of a table. `transposed` returns the logits of a tied head.

    If the vocabulary is sharded, each device looks up the ids of its shard, and an all-reduce adds the others, or a
    reduce-scatter where the layout shards the tokens of hidden states (`zoo.parallel.SEQUENCE`). The
    multiplier is rounded to the dtype of the table, like Gemma's.
    """

    weight: Float[Array, "vocab embed"]

    multiplier: float = eqx.field(static=True)

    def __init__(
        self, vocab: int, embed: int, *, scale: float = 1.0, multiplier: float | int = 1.0, key: Key[Array, ""]
    ):
        """Initialize from a normal distribution truncated at two standard deviations, with standard deviation
        `scale`."""
        self.weight = truncated_normal(key, (vocab, embed), scale)
        self.multiplier = float(multiplier)

    def __call__(self, tokens: Tokens) -> ResidualStream:
        """Look up tokens. An id outside the vocabulary gives NaN, on one device and on any mesh."""
        x = lookup_rows(self.weight, tokens)
        if self.multiplier != 1:
            x = x * self.multiplier
        return x

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


class SharedEmbedding(Module):
    """Stands in an encoder for the embedding of its decoder. It has no parameters."""

    @property
    def table_shape(self) -> tuple[int, int]:
        """**Raises** `TypeError`."""
        raise TypeError(_SHARES_EMBEDDING)

    def __call__(self, tokens: Tokens) -> ResidualStream:
        """**Raises** `TypeError`."""
        raise TypeError(_SHARES_EMBEDDING)


_SHARES_EMBEDDING = "this encoder shares the embedding of its decoder: take EncoderDecoder.whole_encoder"


def lookup_rows(table: Float[Array, "vocab size"], tokens: Tokens) -> Float[Array, "batch tokens size"]:
    """Look up rows of a table whose vocabulary may be sharded; NaN for an id outside it. The result has the tokens of
    hidden states: all, or, with sequence parallelism, the tokens of this device."""
    size = table.shape[0]
    tokens = jnp.asarray(tokens)
    tokens = tokens.astype(jnp.promote_types(tokens.dtype, jnp.int32))  # an int8 does not hold the size of a vocabulary
    local_ids = tokens - shard_offset(table, "vocab", size)
    is_local = (0 <= local_ids) & (local_ids < size)
    rows = jnp.where(is_local[..., None], table[jnp.where(is_local, local_ids, 0)], 0)
    is_valid = (0 <= tokens) & (tokens < size * num_shards(table, "vocab"))
    x = reduce(jnp.where(is_valid[..., None], rows, jnp.nan), over="vocab", into="tokens")
    if x.shape[1] == tokens.shape[1]:
        x = shard_tokens(x)
    return x


class AbstractPositionEmbedding(Module):
    """Embedding of the position of a token in its text, which is added to the token embedding."""

    @property
    @abc.abstractmethod
    def length(self) -> float:
        """Maximum sequence length, infinite if there is none."""

    @abc.abstractmethod
    def __call__(self, positions: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Return the vector of each position. Padding, at negative positions, gets the vector of position 0."""


class PositionEmbedding(AbstractPositionEmbedding):
    """Learned position embedding up to a maximum length (Vaswani et al., arXiv:1706.03762, table 3, row E).

    Position p has row p + `offset`; nothing reads the rows before `offset`, which OPT's table has (2 of them).
    """

    weight: Float[Array, "positions embed"]

    offset: int = eqx.field(static=True)

    def __init__(self, positions: int, embed: int, *, offset: int = 0, scale: float = 1.0, key: Key[Array, ""]):
        self.weight = truncated_normal(key, (positions + offset, embed), scale)
        self.offset = offset

    @property
    def length(self) -> int:
        """Maximum sequence length."""
        return self.weight.shape[0] - self.offset

    def __call__(self, positions: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up positions. Padding, at negative positions, gets the vector of position 0; a position from `length`
        on, NaN."""
        is_valid = positions < self.length
        rows = jnp.where(is_valid, jnp.maximum(positions, 0), 0) + self.offset
        return jnp.where(is_valid[..., None], self.weight[rows], jnp.nan)


class SinusoidalPositionEmbedding(AbstractPositionEmbedding):
    """Fixed position embedding of any length: sines, then cosines, of (position + `offset`) w_i with

        w_i = 10000 ** (-i / `steps`), i = 0, 1, ..., embed / 2 - 1

    (Vaswani et al., arXiv:1706.03762, section 3.5). It has no parameters, and is computed in float32.
    """

    embed: int = eqx.field(static=True)
    offset: int = eqx.field(static=True)
    steps: int = eqx.field(static=True)

    def __init__(self, embed: int, *, offset: int = 0, steps: int | None = None):
        """`steps`: embed / 2 - 1 by default, as tensor2tensor and fairseq compute it; embed / 2 in the paper.

        **Raises** `ValueError` for an odd number of features, and for fewer than 4.
        """
        if embed < 4 or embed % 2:
            raise ValueError(f"sinusoidal positions have an even number of features from 4 on, not {embed}")
        self.embed = embed
        self.offset = offset
        self.steps = embed // 2 - 1 if steps is None else steps

    @property
    def length(self) -> float:
        return math.inf

    def __call__(self, positions: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        frequencies = np.float32(10000.0 ** (-np.arange(self.embed // 2) / self.steps))
        angles = (jnp.maximum(positions, 0) + self.offset).astype(jnp.float32)[..., None] * frequencies
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class TokenTypeEmbedding(Module):
    """Embedding of the type of a token, such as the number of its text in a pair (Devlin et al., arXiv:1810.04805,
    section 3)."""

    weight: Float[Array, "token_types embed"]

    def __init__(self, types: int, embed: int, *, scale: float = 1.0, key: Key[Array, ""]):
        self.weight = truncated_normal(key, (types, embed), scale)

    def __call__(self, token_types: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up types. A type that the table does not have gives NaN."""
        is_valid = (0 <= token_types) & (token_types < self.weight.shape[0])
        return jnp.where(is_valid[..., None], self.weight[jnp.where(is_valid, token_types, 0)], jnp.nan)
