"""Products with matrices that stay packed as MXFP4: what is decoded is one matrix, while it is multiplied.

Gradients flow to the rows, none to what is packed, and a backward pass decodes again instead of keeping what was
decoded. Sums are float32 and rounded to the dtype of the rows, in which the matrix is decoded too.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from .grouped_matmul import BLOCK as ROWS
from .grouped_matmul import sums, taken
from .mxfp4 import BLOCK, decode
from .product import product
from .varying import vary, varying


def packed_matmul(
    x: Float[Array, "rows _"], blocks: UInt8[Array, "out blocks 16"], scales: UInt8[Array, "out blocks"], how: str
) -> Float[Array, "rows _"]:
    """W x of each row with `how="oi"`, Wᵀ x with `how="io"`; W is `decode(blocks, scales)`, of shape [out, in]."""

    def multiply(x: Array, blocks: Array, scales: Array) -> Array:
        return product("ri,oi->ro" if how == "oi" else "ro,oi->ri", x, decode(blocks, scales, x.dtype))

    return jax.checkpoint(multiply)(x, blocks, scales)


def grouped_packed_matmul(
    x: Float[Array, "rows in"],
    blocks: UInt8[Array, "experts out blocks 16"],
    scales: UInt8[Array, "experts out blocks"],
    sizes: Int[Array, "experts"],
) -> Float[Array, "rows out"]:
    """`grouped_matmul` with packed matrices: W[e] x of each row, the first `sizes[0]` rows being expert 0's.

    Experts that have rows follow one another: each is decoded once, multiplies its rows a block at a time and makes
    room for the next. FLOPs: 2 rows in out, and as many again for a gradient. Bytes: of each expert that has rows 4.25
    bits a number are read, and its matrix is written and read once in the dtype of the rows.

    There is no forward-mode differentiation. Rows beyond the sum of `sizes` give zeros.
    """
    axes = varying(x) | varying(blocks) | varying(scales) | varying(sizes)
    return one_by_one(*vary((x, blocks, scales, sizes), axes))


@jax.custom_vjp
def one_by_one(x: Array, blocks: Array, scales: Array, sizes: Array) -> Float[Array, "rows out"]:
    """`grouped_packed_matmul`, of arrays that vary alike over a mesh."""
    return each_decoded_once(x, blocks, scales, sizes, "oi")


def one_by_one_forward(x: Array, blocks: Array, scales: Array, sizes: Array) -> tuple[Array, tuple]:
    """The product, and what its gradient needs."""
    return one_by_one(x, blocks, scales, sizes), (blocks, scales, sizes)


def one_by_one_backward(kept: tuple, gradient: Array) -> tuple[Any, ...]:
    """The rows' gradient is the same product with the matrices the other way round."""
    blocks, scales, sizes = kept
    return each_decoded_once(gradient, blocks, scales, sizes, "io"), None, None, None


one_by_one.defvjp(one_by_one_forward, one_by_one_backward)


def each_decoded_once(x: Array, blocks: Array, scales: Array, sizes: Array, how: str) -> Float[Array, "rows _"]:
    """Each row by its expert's matrix, contracting the dim that `how`, "oi" or "io", calls i."""
    _, out, blocks_of_a_row, _ = blocks.shape
    features = out if how == "oi" else blocks_of_a_row * BLOCK
    size = min(ROWS, 1 << (len(x) - 1).bit_length())
    ends = jnp.cumsum(sizes)
    visited = jnp.argsort(sizes == 0)  # stable: experts that have rows, in their order, then the others

    def one_expert(i: Array, y: Array) -> Array:
        expert = visited[i]
        weight = decode(taken(blocks, expert), taken(scales, expert), x.dtype)

        def one_block(j: Array, y: Array) -> Array:
            # What of a block is not the expert's own belongs to those that follow, who write it once more.
            first = ends[expert] - sizes[expert] + j * size
            rows = x[jnp.minimum(first + jnp.arange(size), len(x) - 1)]
            return lax.dynamic_update_slice_in_dim(y, sums("ri", how, "ro", rows, weight), first, 0)

        return lax.fori_loop(0, -(-sizes[expert] // size), one_block, y)

    start = vary(jnp.zeros((len(x) + size, features), x.dtype), varying(x))
    y = lax.fori_loop(0, (sizes > 0).sum(), one_expert, start)[: len(x)]
    return jnp.where((jnp.arange(len(x)) < ends[-1])[:, None], y, 0)
