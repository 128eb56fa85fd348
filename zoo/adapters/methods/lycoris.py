"""Adapters that add a matrix, put together from small ones while it is multiplied: LoHa and LoKr."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import AbstractLinear, Linear
from zoo.layers.linear import expand_group_values
from zoo.parallel import Dim, adapter_parameter, buffer, shard_offset, wrapped

from ..base import AbstractAdapter, Matrix, Strength, full_strength, get_dims, get_linear_shape
from .low_rank import linear_from_weight


class _AbstractDeltaAdapter(AbstractAdapter):
    """y = W x + b + scale D x. FLOPs: the base's again, and those that make D, once a call."""

    applies: eqx.AbstractVar[Bool[Array, ""]]
    scale: eqx.AbstractVar[Float[Array, ""]]

    @abc.abstractmethod
    def get_delta_weight(self) -> Matrix:
        """D, in float32: of a device's share, its share."""

    def get_scaled_delta_weight(self) -> Matrix:
        """scale D, where it applies."""
        return jnp.where(self.applies, self.scale, 0) * self.get_delta_weight()

    def build_delta_linear(self, dtype: Any) -> Linear:
        return linear_from_weight(self.get_scaled_delta_weight().astype(dtype), in_=self.in_, out=self.out)

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        return self.base(x) + (self.strength_per_row(x) * self.build_delta_linear(x.dtype)(x)).astype(x.dtype)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return self.base.transposed(x) + (
            self.strength_per_row(x) * self.build_delta_linear(x.dtype).transposed(x)
        ).astype(x.dtype)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        each = eqx.filter_vmap(lambda one: one.build_delta_linear(x.dtype))(self)
        counts = expand_group_values(self.strength_per_expert(self.applies)[:, None], sizes, len(x))
        return self.base.grouped(x, sizes) + (counts * each.grouped(x, sizes)).astype(x.dtype)

    def merge_weight(self, weight: Matrix) -> Matrix:
        return weight + self.strength_per_expert(self.applies) * self.get_scaled_delta_weight()


class LoHa(_AbstractDeltaAdapter):
    """D = (B1 A1) ∘ (B2 A2), number by number: of a rank up to the square of the factors' (FedPara, Hyeon-Woo et al.,
    arXiv:2108.06098, section 2.2; as an adapter: LyCORIS, arXiv:2309.14859). B2 starts as zeros."""

    base: AbstractLinear = wrapped()
    up: Float[Array, "out rank"] = adapter_parameter()
    down: Float[Array, "rank in"] = adapter_parameter()
    other_up: Float[Array, "out rank"] = adapter_parameter()
    other_down: Float[Array, "rank in"] = adapter_parameter()
    applies: Bool[Array, ""]
    scale: Float[Array, ""] = buffer()
    strength: Strength = buffer()

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    adapter_name: str = eqx.field(static=True)

    def __init__(
        self,
        base: AbstractLinear,
        *,
        rank: int,
        scale: float | Float[Array, ""],
        applies: bool | Array = True,
        adapter_name: str = "loha",
        key: Key[Array, ""],
    ):
        """As PEFT starts it: A1 and A2 normal with a deviation of 1, B1 of 0.1."""
        (self.in_, self.out), (out_size, in_size), keys = (
            get_dims(base),
            get_linear_shape(base),
            jax.random.split(key, 3),
        )
        self.base, self.other_up = base, jnp.zeros((out_size, rank))
        self.down = jax.random.normal(keys[0], (rank, in_size))
        self.up = 0.1 * jax.random.normal(keys[1], (out_size, rank))
        self.other_down = jax.random.normal(keys[2], (rank, in_size))
        self.scale, self.applies = jnp.asarray(scale, jnp.float32), jnp.asarray(applies)
        self.strength, self.adapter_name = full_strength(), adapter_name

    def get_delta_weight(self) -> Matrix:
        return _matmul_fp32(self.up, self.down) * _matmul_fp32(self.other_up, self.other_down)


class LoKr(_AbstractDeltaAdapter):
    """D = L ⊗ R, the Kronecker product of two small matrices, of which either may be a product of two narrow ones
    (LyCORIS, arXiv:2309.14859, section 3.2).

    Both are whole on every device. Where a mesh splits W, D is made whole there and cut.
    """

    base: AbstractLinear = wrapped()
    left: Float[Array, "left_out left_in"] | None = adapter_parameter()
    left_up: Float[Array, "left_out rank"] | None = adapter_parameter()
    left_down: Float[Array, "rank left_in"] | None = adapter_parameter()
    right: Float[Array, "right_out right_in"] | None = adapter_parameter()
    right_up: Float[Array, "right_out rank"] | None = adapter_parameter()
    right_down: Float[Array, "rank right_in"] | None = adapter_parameter()
    applies: Bool[Array, ""]
    scale: Float[Array, ""] = buffer()
    strength: Strength = buffer()

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    adapter_name: str = eqx.field(static=True)

    def __init__(
        self,
        base: AbstractLinear,
        *,
        rank: int,
        scale: float | Float[Array, ""],
        factor: int = -1,
        decompose_both: bool = False,
        applies: bool | Array = True,
        adapter_name: str = "lokr",
        key: Key[Array, ""],
    ):
        """- `factor`: of outputs and inputs, L gets about so many and R the rest; -1 for as even a cut as there is.
        - `both`: whether L, too, is narrow where `rank` is below half its size.

        L starts as zeros, or with a zero factor; R as PyTorch starts a Linear.
        """
        (self.in_, self.out), (out_size, in_size), keys = (
            get_dims(base),
            get_linear_shape(base),
            jax.random.split(key, 3),
        )
        (left_out, right_out), (left_in, right_in) = _factorization(out_size, factor), _factorization(in_size, factor)
        uniform = lambda key, *shape: jax.random.uniform(key, shape, minval=-1.0, maxval=1.0) * shape[-1] ** -0.5
        self.base = base
        self.left = self.left_up = self.left_down = self.right = self.right_up = self.right_down = None
        if decompose_both and rank < max(left_out, left_in) / 2:
            self.left_up, self.left_down = jnp.zeros((left_out, rank)), uniform(keys[0], rank, left_in)
        else:
            self.left = jnp.zeros((left_out, left_in))
        if rank < max(right_out, right_in) / 2:
            self.right_up, self.right_down = uniform(keys[1], right_out, rank), uniform(keys[2], rank, right_in)
        else:
            self.right = uniform(keys[1], right_out, right_in)
        self.scale, self.applies = jnp.asarray(scale, jnp.float32), jnp.asarray(applies)
        self.strength, self.adapter_name = full_strength(), adapter_name

    def get_delta_weight(self) -> Matrix:
        left = _matmul_fp32(self.left_up, self.left_down) if self.left is None else self.left.astype(jnp.float32)
        right = _matmul_fp32(self.right_up, self.right_down) if self.right is None else self.right.astype(jnp.float32)
        whole = (left[:, None, :, None] * right[None, :, None, :]).reshape(len(left) * len(right), -1)
        return _slice_local_shard(_slice_local_shard(whole, 0, self.base, self.out), 1, self.base, self.in_)


def _slice_local_shard(
    matrix: Float[Array, "_ _"], dim: int, base: AbstractLinear, sharded_dim: Dim
) -> Float[Array, "_ _"]:
    """Of a whole matrix, the rows or columns of this device's share of the base."""
    here = get_linear_shape(base)[dim]
    if here == matrix.shape[dim]:
        return matrix
    return lax.dynamic_slice_in_dim(matrix, shard_offset(base.dense_weight, sharded_dim.name, here), here, dim)


def _matmul_fp32(up: Float[Array, "out rank"] | None, down: Float[Array, "rank in"] | None) -> Matrix:
    assert up is not None and down is not None
    return jnp.matmul(up.astype(jnp.float32), down.astype(jnp.float32), precision="highest")


def _factorization(size: int, factor: int) -> tuple[int, int]:
    """Two numbers whose product is `size`, the first the smaller: `factor` and the rest where that divides, else the
    pair nearest to a square whose first is at most `factor`, if that is given (LyCORIS' rule)."""
    if factor > 0 and size % factor == 0:
        return min(factor, size // factor), max(factor, size // factor)
    most = size if factor == -1 else factor
    first = max(n for n in range(1, int(size**0.5) + 1) if size % n == 0 and n <= most)
    return first, size // first
