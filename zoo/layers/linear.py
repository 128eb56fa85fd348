"""Linear layers. A weight matrix is multiplied only by the module that owns it."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.ops.matmul import add_matmul, einsum_fp32_accum
from zoo.ops.moe.grouped_matmul import expand_group_values, grouped_matmul
from zoo.parallel import Dim, reduce
from zoo.parallel.collectives import shard_offset

from .abstract import AbstractLinear


class Linear(AbstractLinear):
    """y = W x + b, with W of shape [out, in] as in PyTorch.

    A `Linear` is neither column- nor row-parallel: it all-reduces over the dim that it contracts if, and only if, that
    dim is sharded. A bias is sharded like `out`. A replicated one is added once, after the all-reduce, which is a
    reduce-scatter over tokens where the layout shards the tokens of the residual stream.
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
        """Initialize the weight from a normal distribution truncated at two standard deviations, with standard
        deviation `scale / sqrt(in_size)`, and the bias with zeros."""
        self.weight = truncated_normal(key, (out_size, in_size), scale * in_size**-0.5)
        self.bias = jnp.zeros(out_size, jnp.float32) if bias else None
        self.in_ = in_
        self.out = out

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

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*tokens out"]:
        y = reduce_output(contract(x, self.weight, 1), self.in_, self.out)
        if self.bias is not None:
            y = y + self.bias
        return y

    def add_matmul(self, y: Float[Array, "*rows out"], x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        """Return y + W x as one op, which saves a single array for the backward pass. For a replicated dim `in`,
        without a bias."""
        return add_matmul(y, x, self.weight)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return reduce(contract(x, self.weight, 0), over=self.out.name)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        return add_expert_biases(grouped_matmul(x, self.weight, sizes), self.bias, sizes, self.in_)

    def per_head(self, x: Float[Array, "*rows units in"]) -> Float[Array, "*rows units unit"]:
        y = reduce(contract_per_head("rui,uoi->ruo", x, self._split_heads(self.weight)), over=self.in_.name)
        if self.bias is not None:
            y = y + self._split_heads(self.bias)
        return y

    def per_head_transposed(self, x: Float[Array, "*rows units unit"]) -> Float[Array, "*rows units in"]:
        return contract_per_head("ruo,uoi->rui", x, self._split_heads(self.weight))

    def _split_heads(self, parameter: Float[Array, "out *rest"]) -> Float[Array, "units unit *rest"]:
        """Reshape the rows of a weight or bias to the heads of `out`."""
        return parameter.reshape(-1, self.out.unit, *parameter.shape[1:])


def contract(x: Float[Array, "*rows k"], weight: Float[Array, "_ _"], dim: int) -> Float[Array, "*rows n"]:
    """Contract the last dim of `x` with dim 0 or 1 of the weight, without a transpose, which would be one more
    residual.

    All rows are flattened to one dim. With several, XLA's CPU backend transposes the operands of the weight gradient
    element by element and recomputes all fused arithmetic: the gradient of a feed-forward layer took 25% longer.
    """
    terms = "ri,oi->ro" if dim == 1 else "ri,io->ro"
    flat = einsum_fp32_accum(terms, x.reshape(-1, x.shape[-1]), weight)
    return flat.reshape(*x.shape[:-1], flat.shape[-1])


def reduce_output(y: Float[Array, "*rows out"], in_: Dim, out: Dim) -> Float[Array, "*tokens out"]:
    """All-reduce the partial sums of a contraction over `in_`. Those of the residual stream, "batch seq embed", are
    reduce-scattered where the layout shards its tokens (`zoo.parallel.SEQUENCE`)."""
    into = "tokens" if out.name == "embed" and y.ndim == 3 else None
    return reduce(y, over=in_.name, into=into)


def add_expert_biases(
    y: Float[Array, "rows out"],
    biases: Float[Array, "experts out"] | None,
    sizes: Int[Array, "experts"],
    contracted: Dim,
) -> Float[Array, "rows out"]:
    """Add to each row the bias of its expert. If the contracted dim is sharded, `y` is a partial sum, and only the
    first shard adds it."""
    if biases is None:
        return y
    is_first_shard = shard_offset(y, contracted.name, 1) == 0
    return y + jnp.where(is_first_shard, expand_group_values(biases, sizes, y.shape[0]), 0)


def contract_per_head(
    spec: str, x: Float[Array, "*rows u k"], weight: Float[Array, "u _ _"]
) -> Float[Array, "*rows u n"]:
    """Block-diagonal matmul over heads u, with all rows flattened to one dim."""
    flat = einsum_fp32_accum(spec, x.reshape(-1, *x.shape[-2:]), weight)
    return flat.reshape(*x.shape[:-1], flat.shape[-1])


def truncated_normal(key: Key[Array, ""], shape: tuple[int, ...], deviation: float) -> Float[Array, "..."]:
    """Sample a normal distribution truncated at two standard deviations, with standard deviation `deviation` after the
    truncation, in float32 whatever `jax_enable_x64` is."""
    truncated_deviation = 0.87962566103423978
    return jax.random.truncated_normal(key, -2, 2, shape, jnp.float32) * (deviation / truncated_deviation)


def resolve_head_dim(embed: int, heads: int, size: int | None, name: str = "head_dim") -> int:
    """Return `size`, or `embed / heads` if it is None. **Raises** `ValueError` if heads does not divide embed then."""
    if size is None and embed % heads:
        raise ValueError(f"embed={embed} does not divide evenly over {heads} heads: give {name}")
    return embed // heads if size is None else size
