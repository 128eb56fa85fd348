"""LoRA: a matrix that is not learnt, and beside it a product of two narrow ones that is."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractLinear, Linear
from zoo.layers.linear import expand_group_values
from zoo.parallel import Dim, adapter_parameter, buffer, implementation_option, wrapped

from ..base import Matrix, Strength, full_strength, get_dims, get_linear_shape
from .low_rank import AbstractLowRankAdapter, check_dropout_rate, linear_from_weight, low_rank_product

LoRAInit = Literal["zero", "gaussian", "pissa", "olora"]
"""How factors start: B with zeros, A as PyTorch starts a Linear, or normal; or with a part of W, which the base gives
up: its largest singular values (PiSSA, Meng et al., arXiv:2404.02948, section 3), or the first columns of its QR
decomposition (OLoRA, Büyükakyüz, arXiv:2406.01775, section 3). Switched off, such an adapter leaves W without it."""


class LoRA(AbstractLowRankAdapter):
    """y = W x + b + scale B A x, with A of shape [rank, in] and B [out, rank] (Hu et al., arXiv:2106.09685, section
    4.1).

    `scale` is alpha / rank, or alpha / sqrt(rank) (rsLoRA, Kalajdzievski, arXiv:2312.03732). Where layers that are
    stacked have unlike ranks, all have the largest, and rows of A and columns of B beyond a layer's own are zero: a
    fixed point of learning, since the gradient of either is a product with the other.

    FLOPs: 2 rank (in + out) a token beside the base's 2 in out.
    """

    base: AbstractLinear = wrapped()
    down: Linear = adapter_parameter()
    """A."""
    up: Linear = adapter_parameter()
    """B."""
    first_down: Float[Array, "rank in"] | None = buffer()
    first_up: Float[Array, "out rank"] | None = buffer()
    """A and B as they started, where the base gave them up: what it was is W + scale B A of these."""
    rank: Int[Array, ""]
    scale: Float[Array, ""] = buffer()
    strength: Strength = buffer()
    keys: Key[Array, "batch"] | None

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    adapter_name: str = eqx.field(static=True)
    dropout: float = implementation_option()

    def __init__(
        self,
        base: AbstractLinear,
        *,
        max_rank: int,
        rank: int | Int[Array, ""],
        scale: float | Float[Array, ""],
        init: LoRAInit = "zero",
        dropout: float | int = 0.0,
        adapter_name: str = "lora",
        key: Key[Array, ""],
    ):
        """- `largest` is the rank of the arrays, `rank` how much of it counts.
        - `start`: A starts uniform within 1 / sqrt(in), or normal with a deviation of 1 / rank ("gaussian"), and B with
          zeros; or both with a part of W ("pissa", "olora").
        - `dropout`: the share of what A reads that is zeroed while the model is given a key.
        """
        (self.in_, self.out), (out_size, in_size) = get_dims(base), get_linear_shape(base)
        rank = jnp.asarray(rank, jnp.int32)
        scale = jnp.where(rank > 0, jnp.asarray(scale, jnp.float32), 0)
        counts = jnp.arange(max_rank) < rank
        up, self.first_down, self.first_up = jnp.zeros((out_size, max_rank)), None, None
        if init == "gaussian":
            down = jax.random.normal(key, (max_rank, in_size)) / jnp.maximum(rank, 1)
        elif init == "zero":
            down = jax.random.uniform(key, (max_rank, in_size), minval=-(in_size**-0.5), maxval=in_size**-0.5)
        else:
            down, up = _factorize_weight(base.dense_weight, max_rank, jnp.where(scale == 0, 1, scale), init)
            up = jnp.where(counts, up, 0)
            base = _subtract_from_base(base, scale * jnp.matmul(up, down, precision="highest"))
            self.first_down, self.first_up = jnp.where(counts[:, None], down, 0), up
        self.base = base
        self.down = linear_from_weight(jnp.where(counts[:, None], down, 0), in_=self.in_, out=Dim("rank"))
        self.up = linear_from_weight(up, in_=Dim("rank"), out=self.out)
        self.rank, self.scale, self.strength = rank, scale, full_strength()
        self.keys, self.dropout, self.adapter_name = None, check_dropout_rate(dropout), adapter_name

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        return self.up.add_matmul(self.base(x), self.project_down(x, self.scale * self.strength_per_row(x)))

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        inner = self.up.transposed(x.astype(self.up.weight.dtype))
        inner = (inner * (self.scale * self.strength_per_row(x))).astype(inner.dtype)
        return self.base.transposed(x) + self.down.transposed(inner).astype(x.dtype)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        inner = self.down.grouped(x.astype(self.down.weight.dtype), sizes)
        inner = inner * expand_group_values((self.scale * self.strength_per_expert(self.scale))[:, None], sizes, len(x))
        return self.base.grouped(x, sizes) + self.up.grouped(inner.astype(self.up.weight.dtype), sizes).astype(x.dtype)

    def merge_weight(self, weight: Matrix) -> Matrix:
        return weight + self.scale * self.strength_per_expert(self.scale) * low_rank_product(self.down, self.up)


def _factorize_weight(
    matrix: Matrix, rank: int, scale: Float[Array, ""], init: LoRAInit
) -> tuple[Float[Array, "rank in"], Float[Array, "out rank"]]:
    """A and B whose product, scaled, is the largest part of a matrix that a rank can hold; or, of its QR decomposition,
    as the paper has it, A and B whose product is the part itself."""
    if rank > min(matrix.shape):
        raise ValueError(
            f"a matrix of {list(matrix.shape)} has no {rank} directions to start from: take a smaller rank"
        )
    if init == "olora":
        orthogonal, rest = jnp.linalg.qr(matrix)
        return rest[:rank], orthogonal[:, :rank]
    left, values, right = jnp.linalg.svd(matrix, full_matrices=False)
    roots = jnp.sqrt(values[:rank] / scale)
    return roots[:, None] * right[:rank], left[:, :rank] * roots


def _subtract_from_base(base: AbstractLinear, part: Matrix) -> AbstractLinear:
    """The base without a part of its matrix, in the dtypes that it has."""
    return jax.tree.map(
        lambda new, old: new.astype(old.dtype), base.with_weight(base.dense_weight - part, base.dense_bias), base
    )
