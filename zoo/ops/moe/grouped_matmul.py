"""Grouped matrix products of mixtures of experts: one weight matrix per group of rows.

    y[r] = W[e] x[r]        for rows r of expert e, sorted: group_sizes[0] rows of expert 0, then the rows of expert 1

`grouped_matmul_reference` is the definition and multiplies every row by every matrix. `grouped_matmul_ragged` is
`lax.ragged_dot_general`, a kernel on TPUs. On CPUs that is a loop over all experts (16 GFLOP/s where one product
reaches 190: 4,096 rows of 256 by 384, 8 experts, two cores), and on GPUs, as XLA compiles it for H100 without cuDNN, a
product of every row with every matrix. So there `grouped_matmul_padded` copies rows into one bucket per expert, sized
for a balanced load, and multiplies them in one batched product; rows that overflow follow in a loop over blocks, which
reads only the matrices of experts that overflow. No token is dropped under any load. The buckets together hold little
more than all rows; where most experts have no rows, most of the batched product is wasted, and it takes two or three
times as long.

FLOPs: 2 rows in out, and twice that again for a gradient (reference: times experts). Bytes: the matrix of every expert
that has rows, once, and the rows; `grouped_matmul_padded` copies rows in and out of their buckets.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import min_dim
from jaxtyping import Array, Bool, Float, Int

from ..custom_vjps import refuse_forward_mode, refuse_reverse_over_reverse, run_in_rule
from ..implementations import AUTO, Implementation, Operation, always_holds
from ..matmul import einsum_dot_general, einsum_fp32_accum, einsum_in_dtype
from ..platform import current_platform
from ..tokamax import UNMEASURED
from ..varying import align_varying, vary, varying
from .tokamax_grouped_matmul import find_tokamax_grouped_obstacle, grouped_matmul_tokamax

MAX_BLOCK_ROWS = 64
"""Maximal number of rows per step of the loop over overflowing rows."""
_SLACK = 16
"""A bucket holds a balanced load plus 1 / _SLACK of it, so that nearly balanced loads do not overflow."""
_MIN_ROWS_PER_BUCKET = 4
"""Minimal mean number of rows per expert to use buckets: below, they would read matrices of experts without rows."""
_REFUSED = (
    "the padded grouped matmul",
    'set grouped_matmul="masked", as zoo.twice_differentiable(model) does',
)


grouped_matmul_implementation = jax.make_user_context(AUTO)
"""Context manager, `with grouped_matmul_implementation("ragged"):`, that sets the implementation of the grouped matmuls
traced inside: of experts, their adapters and whatever else wraps them. It is part of JAX's trace cache key."""


@dataclasses.dataclass(frozen=True)
class GroupedMatmulRequest:
    """Facts of a call, which the choice of an implementation depends on."""

    rows: int
    experts: int
    in_size: int
    out_size: int
    dtype: Any


def grouped_matmul(
    x: Float[Array, "rows in"], weight: Float[Array, "experts out in"], group_sizes: Int[Array, "experts"]
) -> Float[Array, "rows out"]:
    """Compute W[e] x for each row by the implementation of `GROUPED_MATMUL` that `grouped_matmul_implementation` sets:
    by default ragged on TPUs and padded elsewhere. Rows beyond sum(group_sizes) give zeros.

    Accumulates in float32; the result has the dtype of `x`. Padded, it is a custom VJP, without a forward-mode
    derivative and without one reverse over reverse.

    **Raises** `ValueError` for an unknown implementation.
    """
    experts, out, in_ = weight.shape
    request = GroupedMatmulRequest(x.shape[0], experts, in_, out, x.dtype)
    return GROUPED_MATMUL.select(grouped_matmul_implementation.value, request).function(x, weight, group_sizes)


def grouped_matmul_reference(
    x: Float[Array, "rows in"], weight: Float[Array, "experts out in"], group_sizes: Int[Array, "experts"]
) -> Float[Array, "rows out"]:
    """Compute the grouped product by its definition: multiply all rows by every matrix, and select."""
    expert = find_row_experts(group_sizes, x.shape[0])
    products = jnp.einsum("ri,eoi->ero", x.astype(jnp.float32), weight.astype(jnp.float32), precision="highest")
    selected = jnp.where((expert == jnp.arange(len(group_sizes))[:, None])[..., None], products, 0)
    return selected.sum(0).astype(x.dtype)


def grouped_matmul_ragged(
    x: Float[Array, "rows in"], weight: Float[Array, "experts out in"], group_sizes: Int[Array, "experts"]
) -> Float[Array, "rows out"]:
    """Compute the grouped product by `lax.ragged_dot_general`, without transposing the weight."""
    x, weight, group_sizes = align_varying(x, weight, group_sizes)
    dims = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    return lax.ragged_dot_general(x, weight, group_sizes, dims, preferred_element_type=x.dtype)


def grouped_matmul_padded(
    x: Float[Array, "rows in"], weight: Float[Array, "experts out in"], group_sizes: Int[Array, "experts"]
) -> Float[Array, "rows out"]:
    """Compute the grouped product by buckets for a balanced load, and a loop over blocks for overflowing rows."""
    x, weight = refuse_forward_mode((x, weight), *_REFUSED)
    return _bucketed_matmul(*align_varying(x, weight, group_sizes))


def grouped_matmul_masked(
    x: Float[Array, "rows in"], weight: Float[Array, "experts out in"], group_sizes: Int[Array, "experts"]
) -> Float[Array, "rows out"]:
    """Compute the grouped product one expert after the other: each multiplies all rows, and keeps its own.

    It has derivatives of every order, and in float32 of both modes. FLOPs: those of the other implementations times
    experts. Bytes: the matrices once, and the rows and results once per expert; nothing of the size experts x rows.
    """
    x, weight, group_sizes = align_varying(x, weight, group_sizes)
    expert = find_row_experts(group_sizes, x.shape[0])

    def write_rows(y: Array, one: tuple[Array, Array]) -> tuple[Array, None]:
        matrix, index = one
        product = einsum_fp32_accum("ri,oi->ro", x, matrix, dtype=x.dtype)
        return jnp.where((expert == index)[:, None], product, y), None

    start = vary(jnp.zeros((x.shape[0], weight.shape[1]), x.dtype), varying(x))
    return lax.scan(write_rows, start, (weight, jnp.arange(len(weight))))[0]


def find_row_experts(group_sizes: Int[Array, "experts"], rows: int) -> Int[Array, "rows"]:
    """Return the expert of each row, or the number of experts for rows beyond all groups."""
    return (jnp.arange(rows)[:, None] >= jnp.cumsum(group_sizes)).sum(1)


def expand_group_values(
    values: Float[Array, "experts out"], group_sizes: Int[Array, "experts"], rows: int
) -> Float[Array, "rows out"]:
    """Expand one vector per expert, such as a bias, to rows.

    By a product with a one-hot matrix, whose gradient is a product too and sums in a fixed order.
    """
    one_hot = find_row_experts(group_sizes, rows)[:, None] == jnp.arange(len(group_sizes))
    return jnp.matmul(one_hot.astype(values.dtype), values, precision="highest")


@jax.custom_vjp
def _bucketed_matmul(x: Array, weight: Array, group_sizes: Array) -> Float[Array, "rows out"]:
    """Compute `grouped_matmul_padded` of operands that vary over the same mesh axes."""
    return _multiply_by_expert(x, weight, group_sizes, "oi")


def _bucketed_matmul_fwd(x: Array, weight: Array, group_sizes: Array) -> tuple[Array, tuple]:
    """Return the product, and the operands as residuals."""
    return run_in_rule(_bucketed_matmul, x, weight, group_sizes), (x, weight, group_sizes)


def _bucketed_matmul_bwd(residuals: tuple, gradient: Array) -> tuple[Any, ...]:
    """Return the cotangents: of rows, the grouped product with transposed matrices; of matrices, sums over rows."""
    x, weight, group_sizes = residuals
    gradient = gradient.astype(x.dtype)
    gradients = (
        _multiply_by_expert(gradient, weight, group_sizes, "io"),
        _sum_outer_products(gradient, x, group_sizes),
    )
    return *refuse_reverse_over_reverse(gradients, *_REFUSED), None


_bucketed_matmul.defvjp(_bucketed_matmul_fwd, _bucketed_matmul_bwd)


def _multiply_by_expert(
    x: Array, weight: Array, group_sizes: Array, weight_subscripts: str
) -> Float[Array, "rows out"]:
    """Multiply each row by its expert's matrix, contracting the dim i of `weight_subscripts`, "oi" or "io"."""
    buckets = _ExpertBuckets(group_sizes, x.shape[0])
    out = weight.shape[1 + weight_subscripts.index("o")]
    y = jnp.zeros((x.shape[0], out), x.dtype)
    if buckets.bucket_size:
        padded = buckets.fill_buckets(x, zero_fill=weight_subscripts == "io")
        products = einsum_in_dtype("eri", "e" + weight_subscripts, "ero", padded, weight)
        y = jnp.where(buckets.is_real_row[:, None], products.reshape(-1, out)[buckets.bucket_index], 0)

    def write_block(y: Array, block: _RowBlock) -> Array:
        product = einsum_in_dtype(
            "ri", weight_subscripts, "ro", block.slice_rows(x), index_expert(weight, block.expert)
        )
        return lax.dynamic_update_slice_in_dim(
            y, jnp.where(block.row_mask, product, block.slice_rows(y)), block.start, 0
        )

    return buckets.loop_over_overflow(write_block, y)


def _sum_outer_products(gradient: Array, x: Array, group_sizes: Array) -> Float[Array, "experts out in"]:
    """Sum gradient xᵀ over the rows of each expert, in float32 and rounded once."""
    buckets = _ExpertBuckets(group_sizes, x.shape[0])
    total = jnp.zeros((len(group_sizes), gradient.shape[1], x.shape[1]), jnp.float32)
    if buckets.bucket_size:
        padded = buckets.fill_buckets(gradient, zero_fill=True)
        total = einsum_dot_general("ero", "eri", "eoi", padded, buckets.fill_buckets(x), jnp.float32)

    def add_block(total: Array, block: _RowBlock) -> Array:
        rows = jnp.where(block.row_mask, block.slice_rows(gradient), 0)
        product = einsum_dot_general("ro", "ri", "oi", rows, block.slice_rows(x), jnp.float32)
        return lax.dynamic_update_index_in_dim(total, index_expert(total, block.expert) + product, block.expert, 0)

    return buckets.loop_over_overflow(add_block, total).astype(x.dtype)


class _RowBlock(NamedTuple):
    """A block of consecutive rows, and the expert that overflows into it."""

    expert: Int[Array, ""]
    start: Int[Array, ""]
    row_mask: Bool[Array, "block 1"]
    """True for rows of the expert that are not in its bucket."""

    def slice_rows(self, x: Float[Array, "rows features"]) -> Float[Array, "block features"]:
        """Slice the rows of the block out of an array."""
        return lax.dynamic_slice_in_dim(x, self.start, self.row_mask.shape[0])


class _ExpertBuckets:
    """The assignment of rows to one bucket per expert, and to blocks where a bucket overflows."""

    def __init__(self, group_sizes: Int[Array, "experts"], rows: int):
        self.group_sizes = group_sizes
        self.rows = rows
        experts = len(group_sizes)
        if always_holds(lambda: rows >= _MIN_ROWS_PER_BUCKET * experts):
            self.bucket_size = -(-rows * (_SLACK + 1) // (_SLACK * experts))
        else:
            self.bucket_size = 0
        self.ends = jnp.cumsum(group_sizes)
        self.starts = self.ends - group_sizes
        expert = jnp.minimum(find_row_experts(group_sizes, rows), experts - 1)
        within = jnp.arange(rows) - self.starts[expert]
        self.is_real_row = jnp.arange(rows) < self.ends[-1]
        self.bucket_index = jnp.where(within < self.bucket_size, expert * self.bucket_size + within, 0)

    def fill_buckets(
        self, x: Float[Array, "rows features"], zero_fill: bool = False
    ) -> Float[Array, "experts bucket features"]:
        """Copy rows into the buckets of their experts, padded by zeros if `zero_fill`, else by other rows."""
        index = self.starts[:, None] + jnp.arange(self.bucket_size)
        padded = x[jnp.minimum(index, self.rows - 1)]
        if zero_fill:
            return jnp.where((index < self.ends[:, None])[..., None], padded, 0)
        return padded

    def loop_over_overflow(self, step: Callable[[Array, _RowBlock], Array], carry: Array) -> Array:
        """Run `step(carry, block)` for each block of overflowing rows."""
        size = min_dim(MAX_BLOCK_ROWS, self.rows)
        blocks = -(-jnp.maximum(self.group_sizes - self.bucket_size, 0) // size)
        last = jnp.cumsum(blocks)

        def run_block(i: Array, carry: Array) -> Array:
            expert = jnp.minimum((i >= last).sum(), len(self.group_sizes) - 1)
            first = self.starts[expert] + self.bucket_size + (i - last[expert] + blocks[expert]) * size
            start = jnp.minimum(
                first, self.rows - size
            )  # the last block overlaps the one before instead of exceeding the array
            row = start + jnp.arange(size)
            row_mask = (first <= row) & (row < self.ends[expert])
            return step(carry, _RowBlock(expert, start, row_mask[:, None]))

        return lax.fori_loop(0, last[-1], run_block, vary(carry, varying(self.group_sizes)))


def index_expert(weight: Array, expert: Array) -> Array:
    """Index an array that is stacked over experts."""
    return lax.dynamic_index_in_dim(weight, expert, keepdims=False)


def _find_padded_drawback(request: GroupedMatmulRequest) -> str | None:
    if current_platform() == "tpu":
        return "it copies rows into buckets, and a ragged product does not"
    return None


def _find_ragged_drawback(request: GroupedMatmulRequest) -> str | None:
    # On GPUs: as XLA compiles it for H100 without cuDNN.
    costs = {"cpu": "on CPUs it is a loop over all experts", "gpu": "on GPUs it multiplies every row by every matrix"}
    return costs.get(current_platform())


def _find_tokamax_obstacle(request: GroupedMatmulRequest) -> str | None:
    return find_tokamax_grouped_obstacle(request.rows, request.in_size, request.out_size, request.dtype)


GROUPED_MATMUL = Operation[GroupedMatmulRequest](
    "grouped matmul",
    (
        Implementation("padded", grouped_matmul_padded, find_drawback=_find_padded_drawback),
        Implementation("ragged", grouped_matmul_ragged, find_drawback=_find_ragged_drawback),
        Implementation("tokamax", grouped_matmul_tokamax, _find_tokamax_obstacle, lambda _: UNMEASURED),
        Implementation(
            "masked", grouped_matmul_masked, find_drawback=lambda _: "it multiplies every row by every matrix"
        ),
        Implementation(
            "reference", grouped_matmul_reference, find_drawback=lambda _: "it multiplies every row by every matrix"
        ),
    ),
    kind="grouped_matmul",
)
"""Implementations of the grouped matmul, in the order in which `"auto"` tries them."""
