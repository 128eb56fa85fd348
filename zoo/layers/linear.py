"""Matrices, which only the module that owns them multiplies."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.ops.matmul import add_matmul, einsum_fp32_accum
from zoo.ops.moe.grouped_matmul import expand_group_values, grouped_matmul
from zoo.parallel import Dim, reduce, shard_offset

from .abstract import AbstractLinear


class Linear(AbstractLinear):
    """y = W x + b, with W of shape [out, in] as in PyTorch.

    It is neither column- nor row-parallel: it sums over devices if, and only if, the dim that it contracts is split. A
    bias over a split dim is split with it; over a whole one it is added once, after the sum.
    """

    weight: Float[Array, "out in"]
    bias: Float[Array, "out"] | None

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        in_: Dim = Dim("in"),
        out: Dim = Dim("out"),
        bias: bool = False,
        scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """Weights are drawn from a normal distribution cut off at two standard deviations, its standard deviation
        `scale / sqrt(in_size)`, so that outputs vary as `scale` times the inputs; the bias is zero."""
        self.weight = truncated_normal(key, (out_size, in_size), scale * in_size**-0.5)
        self.bias = jnp.zeros(out_size) if bias else None
        self.in_, self.out = in_, out

    @property
    def out_size(self) -> int:
        return self.weight.shape[-2]

    @property
    def dense_weight(self) -> Float[Array, "out in"]:
        return self.weight.astype(jnp.float32)

    @property
    def dense_bias(self) -> Float[Array, "out"] | None:
        return self.bias

    def with_weight(self, weight: Float[Array, "out in"], bias: Float[Array, "out"] | None) -> "Linear":
        return eqx.tree_at(lambda x: (x.weight, x.bias), self, (weight, bias), is_leaf=lambda x: x is None)

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        y = reduce(contract(x, self.weight, 1), over=self.in_.name)
        return y if self.bias is None else y + self.bias

    def add_matmul(self, y: Float[Array, "*rows out"], x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        """y + W x, which a backward pass keeps as one array. For a whole dim `in`, and without a bias."""
        return add_matmul(y, x, self.weight)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return reduce(contract(x, self.weight, 0), over=self.out.name)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        return add_expert_biases(grouped_matmul(x, self.weight, sizes), self.bias, sizes, self.in_)

    def per_head(self, x: Float[Array, "*rows units in"]) -> Float[Array, "*rows units unit"]:
        y = reduce(_contract_per_head("rui,uoi->ruo", x, self.split_heads(self.weight)), over=self.in_.name)
        return y if self.bias is None else y + self.split_heads(self.bias)

    def per_head_transposed(self, x: Float[Array, "*rows units unit"]) -> Float[Array, "*rows units in"]:
        return _contract_per_head("ruo,uoi->rui", x, self.split_heads(self.weight))

    def split_heads(self, parameter: Float[Array, "out *rest"]) -> Float[Array, "units unit *rest"]:
        """The rows of each of the units that `out` counts."""
        return parameter.reshape(-1, self.out.unit, *parameter.shape[1:])


def contract(x: Float[Array, "*rows k"], weight: Float[Array, "_ _"], dim: int) -> Float[Array, "*rows n"]:
    """The product over the last dim of `x` and the given dim of the weight itself: its transpose would be one more
    array for the backward pass to keep.

    Rows are one dim in the product, whatever they are outside. With several, XLA's CPU backend transposes the weight's
    gradient's operands one number after another, with all the arithmetic that leads to them done again: a feed-forward
    layer's gradient took a quarter more time.
    """
    flat = einsum_fp32_accum("ri,oi->ro" if dim == 1 else "ri,io->ro", x.reshape(-1, x.shape[-1]), weight)
    return flat.reshape(*x.shape[:-1], flat.shape[-1])


def add_expert_biases(
    y: Float[Array, "rows out"],
    biases: Float[Array, "experts out"] | None,
    sizes: Int[Array, "experts"],
    contracted: Dim,
) -> Float[Array, "rows out"]:
    """Products of groups of rows, each with its expert's bias: of devices whose results are to be added up, since they
    contracted a dim that is split, one adds it."""
    if biases is None:
        return y
    first = shard_offset(y, contracted.name, 1) == 0
    return y + jnp.where(first, expand_group_values(biases, sizes, len(y)), 0)


def _contract_per_head(
    spec: str, x: Float[Array, "*rows u k"], weight: Float[Array, "u _ _"]
) -> Float[Array, "*rows u n"]:
    """A product for each unit u. The rows are one dim in it."""
    flat = einsum_fp32_accum(spec, x.reshape(-1, *x.shape[-2:]), weight)
    return flat.reshape(*x.shape[:-1], flat.shape[-1])


def truncated_normal(key: Key[Array, ""], shape: tuple[int, ...], deviation: float) -> Float[Array, "..."]:
    """Normal numbers, none beyond two standard deviations, with exactly this `deviation` after the cut."""
    left_by_the_cut = 0.87962566103423978
    return jax.random.truncated_normal(key, -2, 2, shape) * (deviation / left_by_the_cut)


def resolve_head_dim(embed: int, heads: int, size: int | None, name: str = "head_dim") -> int:
    """The given size of a head, or that of `embed` shared out. **Raises** `ValueError` where it does not."""
    if size is None and embed % heads:
        raise ValueError(f"embed={embed} does not share out over {heads} heads: give {name}")
    return embed // heads if size is None else size
