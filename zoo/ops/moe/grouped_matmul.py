"""A matrix for each group of rows: the product that mixtures of experts are made of.

    y[r] = W[e] x[r]        for the rows r of expert e; rows are sorted: sizes[0] of expert 0, then those of expert 1

Three forms agree. `looped` is the definition and multiplies every row by every matrix. `ragged` is JAX's own
`lax.ragged_dot_general`, a kernel on GPUs and TPUs. On a CPU that one is a loop over all experts (16 GFLOP/s where one
product reaches 190: 4,096 rows of 256 by 384, 8 experts, two cores), so there is `padded`: rows in a box for each
expert, large enough for an even share, in one batched product, and what does not fit in a loop over blocks, which
reads just those matrices that have rows left. Nothing is dropped, however rows are dealt. Boxes together hold little
more than the rows, however many experts there are; where most of these have none, their boxes are multiplied for
nothing, and the product takes two or three times as long.

FLOPs: 2 rows in out of each form's own, and twice that again for a gradient (`looped`: times experts). Bytes: every
matrix that has rows once, and the rows; `padded` copies rows in and out of their boxes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..matmul import HALF_DTYPES, einsum_dot_general, einsum_round_once
from ..varying import vary, varying

MAX_BLOCK_ROWS = 64
"""How many rows a step of the loop over what did not fit takes at most."""
_SLACK = 16
"""A box holds an even share and one part more of so many: loads that are about even then need no loop at all."""
_MIN_ROWS_PER_BUCKET = 4
"""From how many rows an expert on boxes are worth it: below, they would read matrices that no row asks for."""


def grouped_matmul(
    x: Float[Array, "rows in"], weight: Float[Array, "experts out in"], group_sizes: Int[Array, "experts"]
) -> Float[Array, "rows out"]:
    """W[e] x of each row, in the form that suits the backend. Rows beyond the sum of `sizes` give zeros.

    Sums are float32; the result has the dtype of `x`. `padded` has a gradient of its own, and so no forward-mode
    differentiation, which JAX says with a `TypeError`.
    """
    return (grouped_matmul_padded if jax.default_backend() == "cpu" else grouped_matmul_ragged)(x, weight, group_sizes)


def grouped_matmul_reference(
    x: Float[Array, "rows in"], weight: Float[Array, "experts out in"], group_sizes: Int[Array, "experts"]
) -> Float[Array, "rows out"]:
    """The definition: all rows by every matrix, of which each keeps its own."""
    expert = find_row_experts(group_sizes, len(x))
    every = jnp.einsum("ri,eoi->ero", x.astype(jnp.float32), weight.astype(jnp.float32), precision="highest")
    own = jnp.where((expert == jnp.arange(len(group_sizes))[:, None])[..., None], every, 0)
    return own.sum(0).astype(x.dtype)


def grouped_matmul_ragged(
    x: Float[Array, "rows in"], weight: Float[Array, "experts out in"], group_sizes: Int[Array, "experts"]
) -> Float[Array, "rows out"]:
    """`lax.ragged_dot_general`, over the weight as it lies."""
    axes = varying(x) | varying(weight) | varying(group_sizes)
    x, weight, group_sizes = vary((x, weight, group_sizes), axes)
    dims = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    return lax.ragged_dot_general(x, weight, group_sizes, dims, preferred_element_type=x.dtype)


def grouped_matmul_padded(
    x: Float[Array, "rows in"], weight: Float[Array, "experts out in"], group_sizes: Int[Array, "experts"]
) -> Float[Array, "rows out"]:
    """Boxes for an even share of the rows, and a loop over blocks for the rest."""
    axes = varying(x) | varying(weight) | varying(group_sizes)
    return _bucketed_matmul(*vary((x, weight, group_sizes), axes))


def find_row_experts(group_sizes: Int[Array, "experts"], rows: int) -> Int[Array, "rows"]:
    """Whose each row is; rows beyond all groups have the number of experts."""
    return (jnp.arange(rows)[:, None] >= jnp.cumsum(group_sizes)).sum(1)


def expand_group_values(
    values: Float[Array, "experts out"], group_sizes: Int[Array, "experts"], rows: int
) -> Float[Array, "rows out"]:
    """Each row's expert's vector: a bias. As a product, whose gradient is one too, with sums in a fixed order."""
    chosen = find_row_experts(group_sizes, rows)[:, None] == jnp.arange(len(group_sizes))
    return jnp.matmul(chosen.astype(values.dtype), values, precision="highest")


@jax.custom_vjp
def _bucketed_matmul(x: Array, weight: Array, group_sizes: Array) -> Float[Array, "rows out"]:
    """`padded`, of arrays that vary alike over a mesh."""
    return _multiply_by_expert(x, weight, group_sizes, "oi")


def _bucketed_matmul_fwd(x: Array, weight: Array, group_sizes: Array) -> tuple[Array, tuple]:
    """The product, and what its gradient needs."""
    return _bucketed_matmul(x, weight, group_sizes), (x, weight, group_sizes)


def _bucketed_matmul_bwd(residuals: tuple, gradient: Array) -> tuple[Any, ...]:
    """The rows' gradient is the same product with the matrices the other way round; the matrices' sums over rows."""
    x, weight, sizes = residuals
    gradient = gradient.astype(x.dtype)
    return _multiply_by_expert(gradient, weight, sizes, "io"), _sum_outer_products(gradient, x, sizes), None


_bucketed_matmul.defvjp(_bucketed_matmul_fwd, _bucketed_matmul_bwd)


def _multiply_by_expert(
    x: Array, weight: Array, group_sizes: Array, weight_subscripts: str
) -> Float[Array, "rows out"]:
    """Each row by its expert's matrix, contracting the dim of the weight that `how`, "oi" or "io", calls i."""
    places = _ExpertBuckets(group_sizes, len(x))
    out = weight.shape[1 + weight_subscripts.index("o")]
    y = jnp.zeros((len(x), out), x.dtype)
    if places.bucket_size:
        boxes = einsum_in_dtype(
            "eri", "e" + weight_subscripts, "ero", places.fill_buckets(x, zero_fill=weight_subscripts == "io"), weight
        )
        y = jnp.where(places.is_real_row[:, None], boxes.reshape(-1, out)[places.bucket_index], 0)

    def write(y: Array, block: _RowBlock) -> Array:
        new = einsum_in_dtype("ri", weight_subscripts, "ro", block.slice_rows(x), index_expert(weight, block.expert))
        return lax.dynamic_update_slice_in_dim(y, jnp.where(block.row_mask, new, block.slice_rows(y)), block.start, 0)

    return places.loop_over_overflow(write, y)


def _sum_outer_products(gradient: Array, x: Array, group_sizes: Array) -> Float[Array, "experts out in"]:
    """Of each expert the sum over its rows of gradient xᵀ, in float32 and rounded once."""
    places = _ExpertBuckets(group_sizes, len(x))
    total = jnp.zeros((len(group_sizes), gradient.shape[1], x.shape[1]))
    if places.bucket_size:
        total = einsum_dot_general(
            "ero", "eri", "eoi", places.fill_buckets(gradient, zero_fill=True), places.fill_buckets(x), jnp.float32
        )

    def add(total: Array, block: _RowBlock) -> Array:
        own = jnp.where(block.row_mask, block.slice_rows(gradient), 0)
        more = index_expert(total, block.expert) + einsum_dot_general(
            "ro", "ri", "oi", own, block.slice_rows(x), jnp.float32
        )
        return lax.dynamic_update_index_in_dim(total, more, block.expert, 0)

    return places.loop_over_overflow(add, total).astype(x.dtype)


class _RowBlock(NamedTuple):
    """Some rows one after another, those of one expert among them."""

    expert: Int[Array, ""]
    start: Int[Array, ""]
    row_mask: Bool[Array, "block 1"]
    """Which of the rows are the expert's, and not in its box."""

    def slice_rows(self, x: Float[Array, "rows features"]) -> Float[Array, "block features"]:
        """Its rows of an array."""
        return lax.dynamic_slice_in_dim(x, self.start, len(self.row_mask))


class _ExpertBuckets:
    """Which rows stand in the box of their expert, and which are taken a block at a time."""

    def __init__(self, group_sizes: Int[Array, "experts"], rows: int):
        self.group_sizes, self.rows, experts = group_sizes, rows, len(group_sizes)
        self.bucket_size = (
            -(-rows * (_SLACK + 1) // (_SLACK * experts)) if rows >= _MIN_ROWS_PER_BUCKET * experts else 0
        )
        self.ends = jnp.cumsum(group_sizes)
        self.starts = self.ends - group_sizes
        expert = jnp.minimum(find_row_experts(group_sizes, rows), experts - 1)
        within = jnp.arange(rows) - self.starts[expert]
        self.is_real_row = jnp.arange(rows) < self.ends[-1]
        self.bucket_index = jnp.where(within < self.bucket_size, expert * self.bucket_size + within, 0)

    def fill_buckets(
        self, x: Float[Array, "rows features"], zero_fill: bool = False
    ) -> Float[Array, "experts box features"]:
        """Rows in the boxes of their experts. What stands in the rest of a box is another's, or with `empty` zero."""
        index = self.starts[:, None] + jnp.arange(self.bucket_size)
        found = x[jnp.minimum(index, self.rows - 1)]
        return jnp.where((index < self.ends[:, None])[..., None], found, 0) if zero_fill else found

    def loop_over_overflow(self, step: Callable[[Array, _RowBlock], Array], carry: Array) -> Array:
        """`step(carry, block)` for each block of rows that no box holds."""
        size = min(MAX_BLOCK_ROWS, self.rows)
        blocks = -(-jnp.maximum(self.group_sizes - self.bucket_size, 0) // size)
        last = jnp.cumsum(blocks)

        def one(i: Array, carry: Array) -> Array:
            expert = jnp.minimum((i >= last).sum(), len(self.group_sizes) - 1)
            first = self.starts[expert] + self.bucket_size + (i - last[expert] + blocks[expert]) * size
            start = jnp.minimum(first, self.rows - size)  # the last block reaches back, not beyond the array
            row = start + jnp.arange(size)
            own = (first <= row) & (row < self.ends[expert])
            return step(carry, _RowBlock(expert, start, own[:, None]))

        return lax.fori_loop(0, last[-1], one, vary(carry, varying(self.group_sizes)))


def index_expert(weight: Array, expert: Array) -> Array:
    """One expert's part of an array that is stacked over experts."""
    return lax.dynamic_index_in_dim(weight, expert, keepdims=False)


def einsum_in_dtype(left: str, right: str, out: str, x: Array, y: Array) -> Array:
    """A product with float32 sums, rounded to the operands' dtype."""
    return (einsum_round_once if x.dtype in HALF_DTYPES else einsum_dot_general)(left, right, out, x, y, x.dtype)
