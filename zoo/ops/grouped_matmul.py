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

from .product import HALVES, multiply, rounded
from .varying import vary, varying

BLOCK = 64
"""How many rows a step of the loop over what did not fit takes at most."""
SLACK = 16
"""A box holds an even share and one part more of so many: loads that are about even then need no loop at all."""
BOXED = 4
"""From how many rows an expert on boxes are worth it: below, they would read matrices that no row asks for."""


def grouped_matmul(
    x: Float[Array, "rows in"], weight: Float[Array, "experts out in"], sizes: Int[Array, "experts"]
) -> Float[Array, "rows out"]:
    """W[e] x of each row, in the form that suits the backend. Rows beyond the sum of `sizes` give zeros.

    Sums are float32; the result has the dtype of `x`. `padded` has a gradient of its own, and so no forward-mode
    differentiation, which JAX says with a `TypeError`.
    """
    return (padded if jax.default_backend() == "cpu" else ragged)(x, weight, sizes)


def looped(
    x: Float[Array, "rows in"], weight: Float[Array, "experts out in"], sizes: Int[Array, "experts"]
) -> Float[Array, "rows out"]:
    """The definition: all rows by every matrix, of which each keeps its own."""
    expert = expert_of_row(sizes, len(x))
    every = jnp.einsum("ri,eoi->ero", x.astype(jnp.float32), weight.astype(jnp.float32), precision="highest")
    own = jnp.where((expert == jnp.arange(len(sizes))[:, None])[..., None], every, 0)
    return own.sum(0).astype(x.dtype)


def ragged(
    x: Float[Array, "rows in"], weight: Float[Array, "experts out in"], sizes: Int[Array, "experts"]
) -> Float[Array, "rows out"]:
    """`lax.ragged_dot_general`, over the weight as it lies."""
    axes = varying(x) | varying(weight) | varying(sizes)
    x, weight, sizes = vary((x, weight, sizes), axes)
    dims = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    return lax.ragged_dot_general(x, weight, sizes, dims, preferred_element_type=x.dtype)


def padded(
    x: Float[Array, "rows in"], weight: Float[Array, "experts out in"], sizes: Int[Array, "experts"]
) -> Float[Array, "rows out"]:
    """Boxes for an even share of the rows, and a loop over blocks for the rest."""
    axes = varying(x) | varying(weight) | varying(sizes)
    return in_boxes(*vary((x, weight, sizes), axes))


def expert_of_row(sizes: Int[Array, "experts"], rows: int) -> Int[Array, "rows"]:
    """Whose each row is; rows beyond all groups have the number of experts."""
    return (jnp.arange(rows)[:, None] >= jnp.cumsum(sizes)).sum(1)


def of_groups(values: Float[Array, "experts out"], sizes: Int[Array, "experts"], rows: int) -> Float[Array, "rows out"]:
    """Each row's expert's vector: a bias. As a product, whose gradient is one too, with sums in a fixed order."""
    chosen = expert_of_row(sizes, rows)[:, None] == jnp.arange(len(sizes))
    return jnp.matmul(chosen.astype(values.dtype), values, precision="highest")


@jax.custom_vjp
def in_boxes(x: Array, weight: Array, sizes: Array) -> Float[Array, "rows out"]:
    """`padded`, of arrays that vary alike over a mesh."""
    return each_by_its_own(x, weight, sizes, "oi")


def in_boxes_forward(x: Array, weight: Array, sizes: Array) -> tuple[Array, tuple]:
    """The product, and what its gradient needs."""
    return in_boxes(x, weight, sizes), (x, weight, sizes)


def in_boxes_backward(kept: tuple, gradient: Array) -> tuple[Any, ...]:
    """The rows' gradient is the same product with the matrices the other way round; the matrices' sums over rows."""
    x, weight, sizes = kept
    gradient = gradient.astype(x.dtype)
    return each_by_its_own(gradient, weight, sizes, "io"), over_rows(gradient, x, sizes), None


in_boxes.defvjp(in_boxes_forward, in_boxes_backward)


def each_by_its_own(x: Array, weight: Array, sizes: Array, how: str) -> Float[Array, "rows out"]:
    """Each row by its expert's matrix, contracting the dim of the weight that `how`, "oi" or "io", calls i."""
    places = Places(sizes, len(x))
    out = weight.shape[1 + how.index("o")]
    y = jnp.zeros((len(x), out), x.dtype)
    if places.box:
        boxes = sums("eri", "e" + how, "ero", places.boxed(x, empty=how == "io"), weight)
        y = jnp.where(places.real[:, None], boxes.reshape(-1, out)[places.in_box], 0)

    def write(y: Array, block: Block) -> Array:
        new = sums("ri", how, "ro", block.of(x), taken(weight, block.expert))
        return lax.dynamic_update_slice_in_dim(y, jnp.where(block.own, new, block.of(y)), block.start, 0)

    return places.over_rest(write, y)


def over_rows(gradient: Array, x: Array, sizes: Array) -> Float[Array, "experts out in"]:
    """Of each expert the sum over its rows of gradient xᵀ, in float32 and rounded once."""
    places = Places(sizes, len(x))
    total = jnp.zeros((len(sizes), gradient.shape[1], x.shape[1]))
    if places.box:
        total = multiply("ero", "eri", "eoi", places.boxed(gradient, empty=True), places.boxed(x), jnp.float32)

    def add(total: Array, block: Block) -> Array:
        own = jnp.where(block.own, block.of(gradient), 0)
        more = taken(total, block.expert) + multiply("ro", "ri", "oi", own, block.of(x), jnp.float32)
        return lax.dynamic_update_index_in_dim(total, more, block.expert, 0)

    return places.over_rest(add, total).astype(x.dtype)


class Block(NamedTuple):
    """Some rows one after another, those of one expert among them."""

    expert: Int[Array, ""]
    start: Int[Array, ""]
    own: Bool[Array, "block 1"]
    """Which of the rows are the expert's, and not in its box."""

    def of(self, x: Float[Array, "rows features"]) -> Float[Array, "block features"]:
        """Its rows of an array."""
        return lax.dynamic_slice_in_dim(x, self.start, len(self.own))


class Places:
    """Which rows stand in the box of their expert, and which are taken a block at a time."""

    def __init__(self, sizes: Int[Array, "experts"], rows: int):
        self.sizes, self.rows, experts = sizes, rows, len(sizes)
        self.box = -(-rows * (SLACK + 1) // (SLACK * experts)) if rows >= BOXED * experts else 0
        self.ends = jnp.cumsum(sizes)
        self.starts = self.ends - sizes
        expert = jnp.minimum(expert_of_row(sizes, rows), experts - 1)
        within = jnp.arange(rows) - self.starts[expert]
        self.real = jnp.arange(rows) < self.ends[-1]
        self.in_box = jnp.where(within < self.box, expert * self.box + within, 0)

    def boxed(self, x: Float[Array, "rows features"], empty: bool = False) -> Float[Array, "experts box features"]:
        """Rows in the boxes of their experts. What stands in the rest of a box is another's, or with `empty` zero."""
        index = self.starts[:, None] + jnp.arange(self.box)
        found = x[jnp.minimum(index, self.rows - 1)]
        return jnp.where((index < self.ends[:, None])[..., None], found, 0) if empty else found

    def over_rest(self, step: Callable[[Array, Block], Array], carry: Array) -> Array:
        """`step(carry, block)` for each block of rows that no box holds."""
        size = min(BLOCK, self.rows)
        blocks = -(-jnp.maximum(self.sizes - self.box, 0) // size)
        last = jnp.cumsum(blocks)

        def one(i: Array, carry: Array) -> Array:
            expert = jnp.minimum((i >= last).sum(), len(self.sizes) - 1)
            first = self.starts[expert] + self.box + (i - last[expert] + blocks[expert]) * size
            start = jnp.minimum(first, self.rows - size)  # the last block reaches back, not beyond the array
            row = start + jnp.arange(size)
            own = (first <= row) & (row < self.ends[expert])
            return step(carry, Block(expert, start, own[:, None]))

        return lax.fori_loop(0, last[-1], one, vary(carry, varying(self.sizes)))


def taken(weight: Array, expert: Array) -> Array:
    """One expert's part of an array that is stacked over experts."""
    return lax.dynamic_index_in_dim(weight, expert, keepdims=False)


def sums(left: str, right: str, out: str, x: Array, y: Array) -> Array:
    """A product with float32 sums, rounded to the operands' dtype."""
    return (rounded if x.dtype in HALVES else multiply)(left, right, out, x, y, x.dtype)
