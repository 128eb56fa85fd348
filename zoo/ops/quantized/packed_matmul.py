"""Products with matrices that stay packed: what is decoded is a piece of one, while it is multiplied.

What is packed is a tuple of arrays, each with the matrix's outputs in front, and a function that decodes them: those of
`mxfp4`, `nf4` and `int8` alike.

    W = decode(*packed, dtype)        of shape [out, in]; of some rows of each array, these rows of W

Gradients flow to the rows that are multiplied, none to what is packed, and a backward pass decodes again instead of
keeping what was decoded. Sums are float32 and rounded to the dtype of the rows, in which the matrix is decoded too.
There is no forward-mode differentiation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from ..matmul import einsum_dot_general
from ..moe.grouped_matmul import MAX_BLOCK_ROWS as ROWS
from ..moe.grouped_matmul import einsum_in_dtype, index_expert
from ..varying import vary, varying

_TILE_ELEMENTS = 1 << 22
"""How many numbers of a matrix are decoded at a time, at most, unless told: 16 MiB in float32."""

_Dequantize = Callable[..., Float[Array, "out in"]]
"""A function of a module, since programs are compiled by which it is."""


def packed_matmul(
    x: Float[Array, "rows _"], packed: tuple[Shaped[Array, "out ..."], ...], dequantize: _Dequantize, weight_subscripts: str, *,
    tile_elements: int = _TILE_ELEMENTS,
) -> Float[Array, "rows _"]:  # fmt: skip
    """W x of each row with `how="oi"`, Wᵀ x with `how="io"`.

    A matrix of more than `piece` numbers is decoded and multiplied some outputs at a time, one at least: these follow
    one another in the result, or, contracted, are summed in float32 and rounded once.

    FLOPs: 2 rows in out, and as many again for a gradient. Bytes: what is packed once, and the matrix, piece by piece,
    written and read once in the dtype of the rows; with "io" float32 sums too, a piece.
    """
    x, packed = _align_packed_varying(x, packed)
    return _tiled_matmul(dequantize, weight_subscripts, tile_elements, x, packed)


def grouped_packed_matmul(
    x: Float[Array, "rows in"], packed: tuple[Shaped[Array, "experts out ..."], ...], dequantize: _Dequantize,
    group_sizes: Int[Array, "experts"],
) -> Float[Array, "rows out"]:  # fmt: skip
    """`grouped_matmul` with packed matrices: W[e] x of each row, the first `sizes[0]` rows being expert 0's.

    Experts that have rows follow one another: each is decoded once, multiplies its rows a block at a time and makes
    room for the next. FLOPs: 2 rows in out, and as many again for a gradient. Bytes: of each expert that has rows what
    is packed is read, and its matrix is written and read once in the dtype of the rows.

    Rows beyond the sum of `sizes` give zeros.
    """
    x, packed, group_sizes = _align_packed_varying(x, packed, group_sizes)
    return _expertwise_matmul(dequantize, x, packed, group_sizes)


def _align_packed_varying(x: Array, packed: tuple[Array, ...], *rest: Array) -> Any:
    """Everything varying as all of it does over a mesh, and else as it came.

    For its backward pass a scan over layers holds on to the matrices that it was given at no cost, but to a copy of
    what is made of them, were it `stop_gradient`.
    """
    axes = frozenset().union(*map(varying, (x, *packed, *rest)))
    return vary((x, packed, *rest), axes)


def _get_matrix_shape(dequantize: _Dequantize, packed: tuple[Array, ...]) -> tuple[int, int]:
    """Outputs and inputs of a matrix, or of each of those that are stacked, without decoding it."""
    return jax.eval_shape(dequantize, *packed).shape[-2:]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _tiled_matmul(
    dequantize: _Dequantize, weight_subscripts: str, tile_elements: int, x: Array, packed: tuple[Array, ...]
) -> Float[Array, "rows _"]:
    """`packed_matmul`, of arrays that vary alike over a mesh."""
    out, in_size = _get_matrix_shape(dequantize, packed)
    size = max(1, min(out, tile_elements // in_size))
    if size == out:
        return einsum_in_dtype("ri", weight_subscripts, "ro", x, dequantize(*packed, x.dtype))

    def first_and_weight(i: Array) -> tuple[Array, Array]:
        first = jnp.minimum(i * size, out - size)  # the last piece reaches back, not beyond the matrix
        return first, dequantize(*(lax.dynamic_slice_in_dim(array, first, size) for array in packed), x.dtype)

    def follow(i: Array, y: Array) -> Array:
        first, weight = first_and_weight(i)
        return lax.dynamic_update_slice_in_dim(y, einsum_in_dtype("ri", "oi", "ro", x, weight), first, 1)

    def add(i: Array, y: Array) -> Array:
        first, weight = first_and_weight(i)
        own = first + jnp.arange(size) >= i * size
        rows = jnp.where(own, lax.dynamic_slice_in_dim(x, first, size, 1), 0)
        return y + einsum_dot_general("ri", "io", "ro", rows, weight, jnp.float32)

    step, features, dtype = (follow, out, x.dtype) if weight_subscripts == "oi" else (add, in_size, jnp.float32)
    start = vary(jnp.zeros((len(x), features), dtype), varying(x))
    return lax.fori_loop(0, -(-out // size), step, start).astype(x.dtype)


def _tiled_matmul_fwd(
    dequantize: _Dequantize, weight_subscripts: str, tile_elements: int, x: Array, packed: tuple[Array, ...]
) -> tuple[Array, Any]:
    """The product, and what its gradient needs."""
    return _tiled_matmul(dequantize, weight_subscripts, tile_elements, x, packed), packed


def _tiled_matmul_bwd(
    dequantize: _Dequantize, weight_subscripts: str, tile_elements: int, packed: tuple[Array, ...], gradient: Array
) -> tuple[Array, None]:
    """The same product with the matrix the other way round. It waits for the gradient: else the compiler would find
    that the matrix was decoded before, and keep it."""
    gradient, packed = lax.optimization_barrier((gradient, packed))
    return _tiled_matmul(dequantize, weight_subscripts[::-1], tile_elements, gradient, packed), None


_tiled_matmul.defvjp(_tiled_matmul_fwd, _tiled_matmul_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expertwise_matmul(
    dequantize: _Dequantize, x: Array, packed: tuple[Array, ...], group_sizes: Array
) -> Float[Array, "rows out"]:
    """`grouped_packed_matmul`, of arrays that vary alike over a mesh."""
    return _loop_over_experts(dequantize, x, packed, group_sizes, "oi")


def _expertwise_matmul_fwd(
    dequantize: _Dequantize, x: Array, packed: tuple[Array, ...], group_sizes: Array
) -> tuple[Array, tuple]:
    """The product, and what its gradient needs."""
    return _expertwise_matmul(dequantize, x, packed, group_sizes), (packed, group_sizes)


def _expertwise_matmul_bwd(dequantize: _Dequantize, residuals: tuple, gradient: Array) -> tuple[Array, None, None]:
    """The rows' gradient is the same product with the matrices the other way round."""
    packed, sizes = residuals
    return _loop_over_experts(dequantize, gradient, packed, sizes, "io"), None, None


_expertwise_matmul.defvjp(_expertwise_matmul_fwd, _expertwise_matmul_bwd)


def _loop_over_experts(
    dequantize: _Dequantize, x: Array, packed: tuple[Array, ...], group_sizes: Array, weight_subscripts: str
) -> Float[Array, "rows _"]:
    """Each row by its expert's matrix, contracting the dim that `how`, "oi" or "io", calls i."""
    features = _get_matrix_shape(dequantize, packed)[weight_subscripts.index("o")]
    size = min(ROWS, 1 << (len(x) - 1).bit_length())
    ends = jnp.cumsum(group_sizes)
    visited = jnp.argsort(group_sizes == 0)  # stable: experts that have rows, in their order, then the others

    def one_expert(i: Array, y: Array) -> Array:
        expert = visited[i]
        weight = dequantize(*(index_expert(array, expert) for array in packed), x.dtype)

        def one_block(j: Array, y: Array) -> Array:
            # What of a block is not the expert's own belongs to those that follow, who write it once more.
            first = ends[expert] - group_sizes[expert] + j * size
            rows = x[jnp.minimum(first + jnp.arange(size), len(x) - 1)]
            return lax.dynamic_update_slice_in_dim(
                y, einsum_in_dtype("ri", weight_subscripts, "ro", rows, weight), first, 0
            )

        return lax.fori_loop(0, -(-group_sizes[expert] // size), one_block, y)

    start = vary(jnp.zeros((len(x) + size, features), x.dtype), varying(x))
    y = lax.fori_loop(0, (group_sizes > 0).sum(), one_expert, start)[: len(x)]
    return jnp.where((jnp.arange(len(x)) < ends[-1])[:, None], y, 0)
