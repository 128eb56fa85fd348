"""LoRA of an embedding: two narrow tables beside one that is not learnt."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractEmbedding, Linear
from zoo.layers.embedding import looked_up
from zoo.layers.linear import contract
from zoo.parallel import Dim, buffer, settled, transparent, tuned

from .abstract import Weight, alike, counted, on
from .factors import matrix_of


class EmbeddingLoRA(AbstractEmbedding):
    """Row t of E + scale Aᵀ Bᵀ, with Aᵀ of shape [vocab, rank] and B [embed, rank]: a row of Aᵀ is looked up, and
    multiplied with B (Hu et al., arXiv:2106.09685, applied to a table as PEFT does it). A head that is tied to the
    table sees the same sum.

    Aᵀ starts as zeros and B with normal numbers. FLOPs: 2 rank embed a token.
    """

    base: AbstractEmbedding = transparent()
    down: Float[Array, "vocab rank"] = tuned()
    """Aᵀ."""
    up: Linear = tuned()
    """B."""
    rank: Int[Array, ""]
    scale: Float[Array, ""] = buffer()
    weight: Weight = buffer()

    label: str = eqx.field(static=True)
    multiplier: float = eqx.field(static=True)

    def __init__(
        self,
        base: AbstractEmbedding,
        *,
        largest: int,
        rank: int | Int[Array, ""],
        scale: float | Float[Array, ""],
        label: str = "lora",
        key: Key[Array, ""],
    ):
        """`largest` is the rank of the arrays, `rank` how much of it counts."""
        vocab, embed = settled(base).sizes
        self.base, self.multiplier = base, base.multiplier
        self.rank, self.scale = jnp.asarray(rank, jnp.int32), jnp.asarray(scale, jnp.float32)
        up = jnp.where(jnp.arange(largest) < rank, jax.random.normal(key, (embed, largest)), 0)
        self.down = jnp.zeros((vocab, largest))
        self.up = matrix_of(up, in_=Dim("rank"), out=Dim("embed"))
        self.weight, self.label = on(), label

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        rows = looked_up(self.down, tokens)
        factor = self.scale * self.multiplier * counted(self, rows)
        return self.base(tokens) + self.up((rows * factor).astype(rows.dtype))

    def transposed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        inner = self.up.transposed(x.astype(self.up.weight.dtype))
        inner = (inner * (self.scale * counted(self, x))).astype(inner.dtype)
        return self.base.transposed(x) + contract(inner, self.down, 1).astype(x.dtype)

    @property
    def matrix(self) -> Float[Array, "vocab embed"]:
        change = jnp.matmul(self.down.astype(jnp.float32), self.up.matrix.T, precision="highest")
        return self.base.matrix + self.scale * alike(self, self.scale) * change

    def exchanged(self, matrix: Float[Array, "vocab embed"], shift: None = None) -> AbstractEmbedding:
        raise NotImplementedError("the table under an adapter is not exchanged: merge the adapter first")

    @property
    def sizes(self) -> tuple[int, int]:
        return self.base.sizes
