"""LoRA: a matrix that is not learnt, and beside it a product of two narrow ones that is."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractLinear, Linear
from zoo.layers.linear import of_groups
from zoo.parallel import Dim, buffer, manner, transparent, tuned

from .abstract import Matrix, Weight, dims_of, on, sizes_of
from .factors import AbstractFactors, checked_rate, difference, matrix_of

Start = Literal["zero", "gaussian", "pissa", "olora"]
"""How factors start: B with zeros, A as PyTorch starts a Linear, or normal; or with a part of W, which the base gives
up: its largest singular values (PiSSA, Meng et al., arXiv:2404.02948, section 3), or the first columns of its QR
decomposition (OLoRA, Büyükakyüz, arXiv:2406.01775, section 3). Switched off, such an adapter leaves W without it."""


class LoRA(AbstractFactors):
    """y = W x + b + scale B A x, with A of shape [rank, in] and B [out, rank] (Hu et al., arXiv:2106.09685, section
    4.1).

    `scale` is alpha / rank, or alpha / sqrt(rank) (rsLoRA, Kalajdzievski, arXiv:2312.03732). Where layers that are
    stacked have unlike ranks, all have the largest, and rows of A and columns of B beyond a layer's own are zero: a
    fixed point of learning, since the gradient of either is a product with the other.

    FLOPs: 2 rank (in + out) a token beside the base's 2 in out.
    """

    base: AbstractLinear = transparent()
    down: Linear = tuned()
    """A."""
    up: Linear = tuned()
    """B."""
    first_down: Float[Array, "rank in"] | None = buffer()
    first_up: Float[Array, "out rank"] | None = buffer()
    """A and B as they started, where the base gave them up: what it was is W + scale B A of these."""
    rank: Int[Array, ""]
    scale: Float[Array, ""] = buffer()
    weight: Weight = buffer()
    keys: Key[Array, "batch"] | None

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    label: str = eqx.field(static=True)
    dropout: float = manner()

    def __init__(
        self,
        base: AbstractLinear,
        *,
        largest: int,
        rank: int | Int[Array, ""],
        scale: float | Float[Array, ""],
        start: Start = "zero",
        dropout: float | int = 0.0,
        label: str = "lora",
        key: Key[Array, ""],
    ):
        """- `largest` is the rank of the arrays, `rank` how much of it counts.
        - `start`: A starts uniform within 1 / sqrt(in), or normal with a deviation of 1 / rank ("gaussian"), and B with
          zeros; or both with a part of W ("pissa", "olora").
        - `dropout`: the share of what A reads that is zeroed while the model is given a key.
        """
        (self.in_, self.out), (out_size, in_size) = dims_of(base), sizes_of(base)
        rank = jnp.asarray(rank, jnp.int32)
        scale = jnp.where(rank > 0, jnp.asarray(scale, jnp.float32), 0)
        counts = jnp.arange(largest) < rank
        up, self.first_down, self.first_up = jnp.zeros((out_size, largest)), None, None
        if start == "gaussian":
            down = jax.random.normal(key, (largest, in_size)) / jnp.maximum(rank, 1)
        elif start == "zero":
            down = jax.random.uniform(key, (largest, in_size), minval=-(in_size**-0.5), maxval=in_size**-0.5)
        else:
            down, up = part_of(base.matrix, largest, jnp.where(scale == 0, 1, scale), start)
            up = jnp.where(counts, up, 0)
            base = given_up(base, scale * jnp.matmul(up, down, precision="highest"))
            self.first_down, self.first_up = jnp.where(counts[:, None], down, 0), up
        self.base = base
        self.down = matrix_of(jnp.where(counts[:, None], down, 0), in_=self.in_, out=Dim("rank"))
        self.up = matrix_of(up, in_=Dim("rank"), out=self.out)
        self.rank, self.scale, self.weight = rank, scale, on()
        self.keys, self.dropout, self.label = None, checked_rate(dropout), label

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        return self.up.plus(self.base(x), self.inner(x, self.scale * self.counted(x)))

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        inner = self.up.transposed(x.astype(self.up.weight.dtype))
        inner = (inner * (self.scale * self.counted(x))).astype(inner.dtype)
        return self.base.transposed(x) + self.down.transposed(inner).astype(x.dtype)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        inner = self.down.grouped(x.astype(self.down.weight.dtype), sizes)
        inner = inner * of_groups((self.scale * self.alike(self.scale))[:, None], sizes, len(x))
        return self.base.grouped(x, sizes) + self.up.grouped(inner.astype(self.up.weight.dtype), sizes).astype(x.dtype)

    def changed(self, matrix: Matrix) -> Matrix:
        return matrix + self.scale * self.alike(self.scale) * difference(self.down, self.up)


def part_of(
    matrix: Matrix, rank: int, scale: Float[Array, ""], start: Start
) -> tuple[Float[Array, "rank in"], Float[Array, "out rank"]]:
    """A and B whose product, scaled, is the largest part of a matrix that a rank can hold; or, of its QR decomposition,
    as the paper has it, A and B whose product is the part itself."""
    if rank > min(matrix.shape):
        raise ValueError(
            f"a matrix of {list(matrix.shape)} has no {rank} directions to start from: take a smaller rank"
        )
    if start == "olora":
        orthogonal, rest = jnp.linalg.qr(matrix)
        return rest[:rank], orthogonal[:, :rank]
    left, values, right = jnp.linalg.svd(matrix, full_matrices=False)
    roots = jnp.sqrt(values[:rank] / scale)
    return roots[:, None] * right[:rank], left[:, :rank] * roots


def given_up(base: AbstractLinear, part: Matrix) -> AbstractLinear:
    """The base without a part of its matrix, in the dtypes that it has."""
    return jax.tree.map(lambda new, old: new.astype(old.dtype), base.exchanged(base.matrix - part, base.shift), base)
