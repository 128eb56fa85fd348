"""Matrix products with quantized (packed) weights, which are dequantized tile by tile.

A packed matrix is a tuple of arrays with the output dim in front, and a function that dequantizes them, from `mxfp4`,
`nf4` or `int8`.

    W = dequantize(*packed, dtype)        of shape [out, in]; a slice of the rows of all arrays gives these rows of W

The packed weights are frozen: only x gets a gradient. The backward pass dequantizes again instead of saving W as a
residual. Products accumulate in float32 and round to the dtype of x, in which W is dequantized too. The custom VJPs
have no forward-mode differentiation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from ..custom_vjps import refuse_forward_mode, refuse_reverse_over_reverse, run_in_rule
from ..implementations import AUTO
from ..matmul import einsum_dot_general, einsum_in_dtype
from ..moe.grouped_matmul import MAX_BLOCK_ROWS, grouped_matmul_implementation, index_expert
from ..varying import align_varying, vary, varying

_TILE_ELEMENTS = 1 << 22
"""Default maximal number of weights that are dequantized at a time: 16 MiB in float32."""

_Dequantize = Callable[..., Float[Array, "out in"]]
"""A module-level function, since jit caches programs by its identity."""
_Arrays = tuple[Array, ...]


def packed_matmul(
    x: Float[Array, "rows _"],
    packed: tuple[Shaped[Array, "out ..."], ...],
    dequantize: _Dequantize,
    weight_subscripts: str,
    *,
    shared: tuple[Shaped[Array, "..."], ...] = (),
    tile_elements: int = _TILE_ELEMENTS,
) -> Float[Array, "rows _"]:
    """Compute W x for each row (`weight_subscripts="oi"`) or Wᵀ x (`"io"`) with a packed matrix W.

    A matrix of more than `tile_elements` is dequantized and multiplied in tiles of at least one output. The results of
    tiles are concatenated, or for "io" accumulated in float32 and rounded once. Every tile is dequantized with all of
    the `shared` arrays, which follow the packed ones.

    FLOPs: 2 rows in out, and as many again for a gradient. Bytes: the packed arrays once, and W, tile by tile, written
    and read once in the dtype of x; for "io" also float32 sums per tile.
    """
    x = refuse_forward_mode(x, "the product with a packed matrix")
    x, packed, shared = align_varying(x, packed, shared)
    return _tiled_matmul(dequantize, weight_subscripts, tile_elements, x, packed, shared)


def grouped_packed_matmul(
    x: Float[Array, "rows in"],
    packed: tuple[Shaped[Array, "experts out ..."], ...],
    dequantize: _Dequantize,
    group_sizes: Int[Array, "experts"],
    *,
    shared: tuple[Shaped[Array, "experts ..."], ...] = (),
) -> Float[Array, "rows out"]:
    """Compute `grouped_matmul` with packed matrices: W[e] x for rows sorted by expert.

    Experts that have rows run sequentially: each is dequantized once and multiplies its rows block by block. FLOPs: 2
    rows in out, and as many again for a gradient. Bytes: for each expert that has rows, its packed arrays, and its W
    written and read once in the dtype of x.

    An expert's `shared` arrays follow its packed ones, as in `packed_matmul`. Rows beyond sum(group_sizes) give zeros.

    **Raises** `ValueError` inside `grouped_matmul_implementation(name)`, since there is only one implementation.
    """
    if (name := grouped_matmul_implementation.value) != AUTO:
        raise ValueError(
            f"grouped matmul: {name!r} cannot compute this, because the matrices are packed, and dequantized expert by "
            f"expert. Choose {AUTO!r}"
        )
    x = refuse_forward_mode(x, "the grouped matmul of packed matrices")
    x, packed, shared, group_sizes = align_varying(x, packed, shared, group_sizes)
    return _expertwise_matmul(dequantize, x, (*packed, *shared), group_sizes)


def _get_matrix_shape(dequantize: _Dequantize, packed: tuple[Array, ...]) -> tuple[int, int]:
    """Return (out, in) of a packed matrix, or of each stacked one, without dequantizing it."""
    return jax.eval_shape(dequantize, *packed).shape[-2:]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _tiled_matmul(
    dequantize: _Dequantize, weight_subscripts: str, tile_elements: int, x: Array, packed: _Arrays, shared: _Arrays
) -> Float[Array, "rows _"]:
    """Compute `packed_matmul` of operands that vary over the same mesh axes."""
    out, in_size = _get_matrix_shape(dequantize, (*packed, *shared))
    size = max(1, min(out, tile_elements // in_size))
    if size == out:
        return einsum_in_dtype("ri", weight_subscripts, "ro", x, dequantize(*packed, *shared, x.dtype))

    def dequantize_tile(i: Array) -> tuple[Array, Array]:
        first = jnp.minimum(i * size, out - size)  # the last tile overlaps the one before instead of exceeding W
        tile = (lax.dynamic_slice_in_dim(array, first, size) for array in packed)
        return first, dequantize(*tile, *shared, x.dtype)

    def write_outputs(i: Array, y: Array) -> Array:
        first, weight = dequantize_tile(i)
        return lax.dynamic_update_slice_in_dim(y, einsum_in_dtype("ri", "oi", "ro", x, weight), first, 1)

    def add_outputs(i: Array, y: Array) -> Array:
        first, weight = dequantize_tile(i)
        is_new = first + jnp.arange(size) >= i * size
        rows = jnp.where(is_new, lax.dynamic_slice_in_dim(x, first, size, 1), 0)
        return y + einsum_dot_general("ri", "io", "ro", rows, weight, jnp.float32)

    if weight_subscripts == "oi":
        step = write_outputs
        start = jnp.zeros((len(x), out), x.dtype)
    else:
        step = add_outputs
        start = jnp.zeros((len(x), in_size), jnp.float32)
    start = vary(start, varying(x))
    return lax.fori_loop(0, -(-out // size), step, start).astype(x.dtype)


def _tiled_matmul_fwd(
    dequantize: _Dequantize, weight_subscripts: str, tile_elements: int, x: Array, packed: _Arrays, shared: _Arrays
) -> tuple[Array, Any]:
    """Return the product, and the packed weights as residuals."""
    y = run_in_rule(_tiled_matmul, dequantize, weight_subscripts, tile_elements, x, packed, shared)
    return y, (packed, shared)


def _tiled_matmul_bwd(
    dequantize: _Dequantize,
    weight_subscripts: str,
    tile_elements: int,
    residuals: tuple[_Arrays, _Arrays],
    gradient: Array,
) -> tuple[Array, None, None]:
    """Return the cotangent of x, a product with the transposed matrix.

    The barrier prevents XLA from reusing, and so keeping, the matrix that the forward pass dequantized.
    """
    gradient, (packed, shared) = lax.optimization_barrier((gradient, residuals))
    transposed = weight_subscripts[::-1]
    return run_in_rule(_tiled_matmul, dequantize, transposed, tile_elements, gradient, packed, shared), None, None


_tiled_matmul.defvjp(_tiled_matmul_fwd, _tiled_matmul_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expertwise_matmul(
    dequantize: _Dequantize, x: Array, packed: tuple[Array, ...], group_sizes: Array
) -> Float[Array, "rows out"]:
    """Compute `grouped_packed_matmul` of operands that vary over the same mesh axes."""
    return _loop_over_experts(dequantize, x, packed, group_sizes, "oi")


def _expertwise_matmul_fwd(
    dequantize: _Dequantize, x: Array, packed: tuple[Array, ...], group_sizes: Array
) -> tuple[Array, tuple]:
    """Return the product, and the packed weights and group sizes as residuals."""
    return run_in_rule(_expertwise_matmul, dequantize, x, packed, group_sizes), (packed, group_sizes)


def _expertwise_matmul_bwd(dequantize: _Dequantize, residuals: tuple, gradient: Array) -> tuple[Array, None, None]:
    """Return the cotangent of x, the grouped product with transposed matrices."""
    packed, group_sizes = residuals
    x_gradient = _loop_over_experts(dequantize, gradient, packed, group_sizes, "io")
    instead = "take the model with zoo.adapters.dequantize"
    return refuse_reverse_over_reverse(x_gradient, "the grouped matmul of packed matrices", instead), None, None


_expertwise_matmul.defvjp(_expertwise_matmul_fwd, _expertwise_matmul_bwd)


def _loop_over_experts(
    dequantize: _Dequantize, x: Array, packed: tuple[Array, ...], group_sizes: Array, weight_subscripts: str
) -> Float[Array, "rows _"]:
    """Multiply each row by its expert's matrix, contracting the dim i of `weight_subscripts`, "oi" or "io"."""
    features = _get_matrix_shape(dequantize, packed)[weight_subscripts.index("o")]
    size = min(MAX_BLOCK_ROWS, 1 << (len(x) - 1).bit_length())
    ends = jnp.cumsum(group_sizes)
    order = jnp.argsort(group_sizes == 0)  # stable: experts that have rows first

    def run_expert(i: Array, y: Array) -> Array:
        expert = order[i]
        weight = dequantize(*(index_expert(array, expert) for array in packed), x.dtype)

        def run_block(j: Array, y: Array) -> Array:
            # Rows of a block beyond the expert belong to later experts, which overwrite them.
            first = ends[expert] - group_sizes[expert] + j * size
            rows = x[jnp.minimum(first + jnp.arange(size), len(x) - 1)]
            return lax.dynamic_update_slice_in_dim(
                y, einsum_in_dtype("ri", weight_subscripts, "ro", rows, weight), first, 0
            )

        return lax.fori_loop(0, -(-group_sizes[expert] // size), run_block, y)

    start = vary(jnp.zeros((len(x) + size, features), x.dtype), varying(x))
    y = lax.fori_loop(0, (group_sizes > 0).sum(), run_expert, start)[: len(x)]
    return jnp.where((jnp.arange(len(x)) < ends[-1])[:, None], y, 0)
