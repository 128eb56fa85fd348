"""LyCORIS methods: LoHa and LoKr add a dense update that is a Hadamard or Kronecker product of small factors."""

import abc
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractLinear, Linear
from zoo.models.targets import Targets, find_linears, get_linear_shape
from zoo.ops.moe.grouped_matmul import expand_group_values
from zoo.parallel import Dim, buffer
from zoo.parallel.collectives import shard_offset
from zoo.parallel.fields import adapter_parameter

from ..apply import apply_uniform, compute_scale
from ..base import AbstractUniformAdapter, Matrix
from ..peft_limits import resolve_targets
from .low_rank import linear_from_weight

_Model = TypeVar("Model")


class _AbstractDeltaAdapter(AbstractUniformAdapter):
    """y = W x + b + scale D x, where D is computed from its factors once per call. FLOPs: the base's again, and those
    of D."""

    scale: Float[Array, ""] = buffer()

    def __init__(
        self, base: AbstractLinear, *, scale: float | Float[Array, ""], applies: bool | Array, adapter_name: str
    ):
        super().__init__(base, applies=applies, adapter_name=adapter_name)
        self.scale = jnp.asarray(scale, jnp.float32)

    @abc.abstractmethod
    def get_delta_weight(self) -> Matrix:
        """Return D in float32, or this device's shard of it."""

    def _get_scaled_delta_weight(self) -> Matrix:
        """Return scale D, or zeros if the adapter does not apply."""
        return jnp.where(self.applies, self.scale, 0) * self.get_delta_weight()

    def _build_delta_linear(self, dtype: Any) -> Linear:
        return linear_from_weight(self._get_scaled_delta_weight().astype(dtype), in_=self.in_, out=self.out)

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*tokens out"]:
        """Return W x + b + scale D x."""
        return self.base(x) + (self.strength_per_row(x) * self._build_delta_linear(x.dtype)(x)).astype(x.dtype)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return self.base.transposed(x) + (
            self.strength_per_row(x) * self._build_delta_linear(x.dtype).transposed(x)
        ).astype(x.dtype)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        delta = eqx.filter_vmap(lambda adapter: adapter._build_delta_linear(x.dtype))(self)
        strength = expand_group_values(self.strength_per_expert(self.applies)[:, None], sizes, len(x))
        return self.base.grouped(x, sizes) + (strength * delta.grouped(x, sizes)).astype(x.dtype)

    def merge_weight(self, weight: Matrix) -> Matrix:
        return weight + self.strength_per_expert(self.applies) * self._get_scaled_delta_weight()


class LoHa(_AbstractDeltaAdapter):
    """D = (B1 A1) ∘ (B2 A2), a Hadamard product whose rank is at most the square of the factors' (FedPara, Hyeon-Woo et
    al., arXiv:2108.06098, section 2.2; as an adapter: LyCORIS, arXiv:2309.14859)."""

    up: Float[Array, "out rank"] = adapter_parameter()
    """B1."""
    down: Float[Array, "rank in"] = adapter_parameter()
    """A1."""
    other_up: Float[Array, "out rank"] = adapter_parameter()
    """B2."""
    other_down: Float[Array, "rank in"] = adapter_parameter()
    """A2."""

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
        """Initialize as PEFT does: A1 and A2 normal with standard deviation 1, B1 with 0.1, B2 zero."""
        super().__init__(base, scale=scale, applies=applies, adapter_name=adapter_name)
        out_size, in_size = get_linear_shape(base)
        keys = jax.random.split(key, 3)
        self.other_up = jnp.zeros((out_size, rank), jnp.float32)
        self.down = jax.random.normal(keys[0], (rank, in_size), jnp.float32)
        self.up = 0.1 * jax.random.normal(keys[1], (out_size, rank), jnp.float32)
        self.other_down = jax.random.normal(keys[2], (rank, in_size), jnp.float32)

    def get_delta_weight(self) -> Matrix:
        return _matmul_fp32(self.up, self.down) * _matmul_fp32(self.other_up, self.other_down)


class LoKr(_AbstractDeltaAdapter):
    """D = L ⊗ R, the Kronecker product of two small matrices, either of which may be a low-rank product itself
    (LyCORIS, arXiv:2309.14859, section 3.2).

    The factors are replicated. If W is sharded, each device computes the full D and slices its shard.
    """

    left: Float[Array, "left_out left_in"] | None = adapter_parameter()
    left_up: Float[Array, "left_out rank"] | None = adapter_parameter()
    left_down: Float[Array, "rank left_in"] | None = adapter_parameter()
    right: Float[Array, "right_out right_in"] | None = adapter_parameter()
    right_up: Float[Array, "right_out rank"] | None = adapter_parameter()
    right_down: Float[Array, "rank right_in"] | None = adapter_parameter()

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
        """- `factor`: approximate number of rows and of columns of L; R has the rest. -1 for the most even
          factorization.
        - `decompose_both`: L is a low-rank product too if `rank` is below half its size.

        L is initialized with zeros, or with a zero factor; R as PyTorch initializes a Linear.
        """
        super().__init__(base, scale=scale, applies=applies, adapter_name=adapter_name)
        out_size, in_size = get_linear_shape(base)
        keys = jax.random.split(key, 3)
        (left_out, right_out), (left_in, right_in) = factorize(out_size, factor), factorize(in_size, factor)
        uniform = lambda key, *shape: jax.random.uniform(key, shape, jnp.float32, -1.0, 1.0) * shape[-1] ** -0.5
        self.left = self.left_up = self.left_down = self.right = self.right_up = self.right_down = None
        if decompose_both and rank < max(left_out, left_in) / 2:
            self.left_up = jnp.zeros((left_out, rank), jnp.float32)
            self.left_down = uniform(keys[0], rank, left_in)
        else:
            self.left = jnp.zeros((left_out, left_in), jnp.float32)
        if rank < max(right_out, right_in) / 2:
            self.right_up = uniform(keys[1], right_out, rank)
            self.right_down = uniform(keys[2], rank, right_in)
        else:
            self.right = uniform(keys[1], right_out, right_in)

    def get_delta_weight(self) -> Matrix:
        if self.left is None:
            left = _matmul_fp32(self.left_up, self.left_down)
        else:
            left = self.left.astype(jnp.float32)
        if self.right is None:
            right = _matmul_fp32(self.right_up, self.right_down)
        else:
            right = self.right.astype(jnp.float32)
        delta = (left[:, None, :, None] * right[None, :, None, :]).reshape(len(left) * len(right), -1)
        return _slice_local_shard(_slice_local_shard(delta, 0, self.base, self.out), 1, self.base, self.in_)


def loha(
    model: _Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 8,
    alpha: float | int | None = None,
    adapter_name: str = "loha",
    key: Key[Array, ""],
) -> _Model:
    """Wrap each target module with a `LoHa` and freeze the rest of the model. The update is scaled by alpha / rank;
    `alpha` defaults to `rank`. **Raises** `ValueError` for a target that matches nothing, and for a rank below 1."""
    factory = partial(LoHa, rank=rank, scale=compute_scale(alpha, rank), adapter_name=adapter_name)
    targets = resolve_targets(model, targets, find_linears(model, include_embeddings=True), "LoHa")
    return apply_uniform(model, factory, targets, key, adapter_name)


def lokr(
    model: _Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 8,
    alpha: float | int | None = None,
    factor: int = -1,
    decompose_both: bool = False,
    adapter_name: str = "lokr",
    key: Key[Array, ""],
) -> _Model:
    """Wrap each target module with a `LoKr` and freeze the rest of the model. The update is scaled by alpha / rank;
    `alpha` defaults to `rank`. `factor` and `decompose_both` are as in `LoKr`. **Raises** `ValueError` for a target
    that matches nothing, and for a rank below 1."""
    factory = partial(
        LoKr,
        rank=rank,
        scale=compute_scale(alpha, rank),
        factor=factor,
        decompose_both=decompose_both,
        adapter_name=adapter_name,
    )
    targets = resolve_targets(model, targets, find_linears(model, include_embeddings=True), "LoKr")
    return apply_uniform(model, factory, targets, key, adapter_name)


def _slice_local_shard(
    matrix: Float[Array, "_ _"], dim: int, base: AbstractLinear, sharded_dim: Dim
) -> Float[Array, "_ _"]:
    """Slice a replicated matrix along `dim` to this device's shard of the base."""
    local_size = get_linear_shape(base)[dim]
    if local_size == matrix.shape[dim]:
        return matrix
    offset = shard_offset(base.dense_weight, sharded_dim.name, local_size)
    return lax.dynamic_slice_in_dim(matrix, offset, local_size, dim)


def _matmul_fp32(up: Float[Array, "out rank"] | None, down: Float[Array, "rank in"] | None) -> Matrix:
    assert up is not None and down is not None
    return jnp.matmul(up.astype(jnp.float32), down.astype(jnp.float32), precision="highest")


def factorize(size: int, factor: int) -> tuple[int, int]:
    """Factor `size` into two numbers, the smaller first: `factor` and the rest if it divides `size`, else the pair
    nearest to a square whose first number is at most `factor`, if that is given (LyCORIS' rule)."""
    if factor > 0 and size % factor == 0:
        return min(factor, size // factor), max(factor, size // factor)
    limit = size if factor == -1 else factor
    first = max(n for n in range(1, int(size**0.5) + 1) if size % n == 0 and n <= limit)
    return first, size // first
