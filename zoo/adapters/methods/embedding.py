"""LoRA of an embedding: a trainable low-rank update of a frozen embedding table."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import Linear
from zoo.layers.embedding import AbstractEmbedding, lookup_rows
from zoo.layers.linear import contract
from zoo.parallel import Dim, buffer
from zoo.parallel.fields import adapter_parameter, wrapped
from zoo.parallel.trainable_copy import materialize
from zoo.shapes import ResidualStream, Tokens

from ..base import AbstractAdapter, Strength
from .low_rank import linear_from_weight


class EmbeddingLoRA(AbstractAdapter, AbstractEmbedding):
    """Row t of E + scale Aᵀ Bᵀ, with Aᵀ of shape [vocab, rank] and B [embed, rank]: look up a row of Aᵀ and multiply it
    by B (Hu et al., arXiv:2106.09685, applied to an embedding table as PEFT does). A tied head uses the same sum.

    Aᵀ is initialized with zeros, B from a normal distribution. FLOPs: 2 rank embed per token.
    """

    base: AbstractEmbedding = wrapped()
    down: Float[Array, "vocab rank"] = adapter_parameter()
    """Aᵀ."""
    up: Linear = adapter_parameter()
    """B."""
    rank: Int[Array, ""]
    scale: Float[Array, ""] = buffer()
    strength: Strength = buffer()

    adapter_name: str = eqx.field(static=True)
    multiplier: float = eqx.field(static=True)

    def __init__(
        self,
        base: AbstractEmbedding,
        *,
        max_rank: int,
        rank: int | Int[Array, ""],
        scale: float | Float[Array, ""],
        adapter_name: str = "lora",
        key: Key[Array, ""],
    ):
        """`max_rank` is the rank of the arrays, of which `rank` is used."""
        vocab, embed = materialize(base).table_shape
        self.base = base
        self.multiplier = base.multiplier
        self.rank = jnp.asarray(rank, jnp.int32)
        self.scale = jnp.asarray(scale, jnp.float32)
        up = jnp.where(jnp.arange(max_rank) < rank, jax.random.normal(key, (embed, max_rank), jnp.float32), 0)
        self.down = jnp.zeros((vocab, max_rank), jnp.float32)
        self.up = linear_from_weight(up, in_=Dim("rank"), out=Dim("embed"))
        self.strength = jnp.ones((), jnp.float32)
        self.adapter_name = adapter_name

    @property
    def has_adapter(self) -> Bool[Array, "*stacked"]:
        return self.rank > 0

    def __call__(self, tokens: Tokens) -> ResidualStream:
        """Return (E + scale Aᵀ Bᵀ)[tokens] times the multiplier."""
        rows = lookup_rows(self.down, tokens)
        factor = self.scale * self.multiplier * self.strength_per_row(rows)
        return self.base(tokens) + self.up((rows * factor).astype(rows.dtype))

    def transposed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        inner = self.up.transposed(x.astype(self.up.weight.dtype))
        inner = (inner * (self.scale * self.strength_per_row(x))).astype(inner.dtype)
        return self.base.transposed(x) + contract(inner, self.down, 1).astype(x.dtype)

    @property
    def dense_weight(self) -> Float[Array, "vocab embed"]:
        update = jnp.matmul(self.down.astype(jnp.float32), self.up.dense_weight.T, precision="highest")
        return self.base.dense_weight + self.scale * self.strength_per_expert(self.scale) * update

    def with_weight(self, weight: Float[Array, "vocab embed"], bias: None = None) -> AbstractEmbedding:
        raise NotImplementedError("the table under an adapter is not exchanged: merge the adapter first")

    @property
    def table_shape(self) -> tuple[int, int]:
        return self.base.table_shape
