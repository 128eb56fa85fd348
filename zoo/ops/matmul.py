"""Matrix products in half precision: sums in float32, rounded once, and so in the gradient.

Two things make them a function of their own. XLA's CPU backend uses a processor's bfloat16 units (AVX-512 BF16, AMX)
where operands are bfloat16 and the result float32, and converts to float32 first where the result is bfloat16 too: 430
against 190 GFLOP/s on two cores of an EPYC (jax 0.10). And where a result is kept in float32, as attention's scores
are, JAX's gradient multiplies float32 by bfloat16, which no matrix unit does.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .varying import vary, varying

HALF_DTYPES = (jnp.bfloat16, jnp.float16)


def einsum_fp32_accum(
    spec: str, x: Float[Array, "..."], y: Float[Array, "..."], *, dtype: Any = None
) -> Float[Array, "..."]:
    """`jnp.einsum(spec, x, y)` in the operands' dtype, or with its float32 sums as `dtype=jnp.float32`.

    Every letter of `spec` stands in two of its three terms, or in all where it is a batch dim, so that a gradient is an
    einsum with the terms exchanged. Of half precision, gradients are rounded to the operands' dtype before they are
    multiplied and after, whatever the result's; and there is no forward-mode differentiation, which JAX says with a
    `TypeError`.

    **Raises** `ValueError` for a letter that stands in one term only.
    """
    left, right, out = _parse_einsum_terms(spec)
    dtype = jnp.result_type(x, y) if dtype is None else dtype
    if x.dtype != y.dtype or x.dtype not in HALF_DTYPES:
        return einsum_dot_general(left, right, out, x, y, dtype)
    axes = varying(x) | varying(y)
    return _half_precision_einsum((left, right, out, dtype), vary(x, axes), vary(y, axes))


def _parse_einsum_terms(spec: str) -> tuple[str, str, str]:
    """`"ab,cb->ac"` as its three terms."""
    operands, _, out = spec.partition("->")
    left, _, right = operands.partition(",")
    alone = [letter for letter in set(left + right + out) if (left + right + out).count(letter) < 2]
    if alone or not (left and right and out):
        raise ValueError(
            f"product: {spec!r} is no product of two arrays whose letters each stand in two terms or three"
        )
    return left, right, out


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _half_precision_einsum(
    terms_and_dtype: tuple[str, str, str, Any], x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
    """The product of two arrays in half precision, `how` being its three terms and the result's dtype."""
    left, right, out, dtype = terms_and_dtype
    return einsum_round_once(left, right, out, x, y, dtype)


def _half_precision_einsum_fwd(
    terms_and_dtype: tuple[str, str, str, Any], x: Float[Array, "..."], y: Float[Array, "..."]
) -> tuple:
    """The product, and what its gradient needs."""
    return _half_precision_einsum(terms_and_dtype, x, y), (x, y)


def _half_precision_einsum_bwd(
    terms_and_dtype: tuple[str, str, str, Any], residuals: tuple, gradient: Float[Array, "..."]
) -> tuple:
    """An einsum for each operand, with the terms exchanged."""
    left, right, out, _ = terms_and_dtype
    x, y = residuals
    gradient = gradient.astype(x.dtype)
    return (
        einsum_round_once(out, right, left, gradient, y, x.dtype),
        einsum_round_once(out, left, right, gradient, x, y.dtype),
    )


_half_precision_einsum.defvjp(_half_precision_einsum_fwd, _half_precision_einsum_bwd)


def add_matmul(
    y: Float[Array, "*rows out"], x: Float[Array, "*rows in"], weight: Float[Array, "out in"]
) -> Float[Array, "*rows out"]:
    """y + W x, as one operation with a gradient of its own: where matrix products are kept for a backward pass and the
    rest is computed again, the sum is kept, and neither y nor W x beside it."""
    flat = lambda z: z.reshape(-1, z.shape[-1])
    axes = varying(y) | varying(x) | varying(weight)
    return _add_matmul_custom_vjp(vary(flat(y), axes), vary(flat(x), axes), vary(weight, axes)).reshape(y.shape)


@jax.custom_vjp
def _add_matmul_custom_vjp(
    y: Float[Array, "rows out"], x: Float[Array, "rows in"], weight: Float[Array, "out in"]
) -> Float[Array, "rows out"]:
    """`plus_product`, of arrays that vary alike over a mesh."""
    return y + einsum_fp32_accum("ri,oi->ro", x, weight).astype(y.dtype)


def _add_matmul_fwd(
    y: Float[Array, "rows out"], x: Float[Array, "rows in"], weight: Float[Array, "out in"]
) -> tuple[Float[Array, "rows out"], tuple]:
    """The sum, and what its gradient needs."""
    return _add_matmul_custom_vjp(y, x, weight), (x, weight)


def _add_matmul_bwd(residuals: tuple, gradient: Float[Array, "rows out"]) -> tuple:
    """What comes in for y, and a product for each of the others."""
    x, weight = residuals
    theirs = gradient.astype(x.dtype)
    return gradient, einsum_fp32_accum("ro,oi->ri", theirs, weight), einsum_fp32_accum("ro,ri->oi", theirs, x)


_add_matmul_custom_vjp.defvjp(_add_matmul_fwd, _add_matmul_bwd)


def einsum_round_once(
    left: str, right: str, out: str, x: Float[Array, "..."], y: Float[Array, "..."], dtype: Any
) -> Float[Array, "..."]:
    """The sums in float32, rounded to `dtype`: by the product itself, except where that is slow."""
    if jax.default_backend() != "cpu":
        return einsum_dot_general(left, right, out, x, y, dtype)
    if (
        len(left) == len(right) == len(out) == 2 and left[0] == right[0]
    ):  # over the rows of both, which the fast kernels do not take
        if left[1] != out[0]:
            x, y, left, right = y, x, right, left
        x, left = blocked_transpose(x), left[::-1]
    return einsum_dot_general(left, right, out, x, y, jnp.float32).astype(dtype)


def einsum_dot_general(
    left: str, right: str, out: str, x: Float[Array, "..."], y: Float[Array, "..."], dtype: Any
) -> Float[Array, "..."]:
    """The einsum as one product and, where its dims come in another order, a transpose."""
    batch = [letter for letter in left if letter in right and letter in out]
    contracted = [letter for letter in left if letter in right and letter not in out]
    found = [*batch, *(letter for letter in left + right if letter in out and letter not in batch)]
    place = lambda letters: ([left.index(letter) for letter in letters], [right.index(letter) for letter in letters])
    sums = lax.dot_general(x, y, (place(contracted), place(batch)), preferred_element_type=dtype)
    return sums if found == list(out) else sums.transpose([found.index(letter) for letter in out])


def blocked_transpose(x: Float[Array, "rows columns"]) -> Float[Array, "columns rows"]:
    """`x.T` as an array of its own, turned in small squares: XLA's CPU backend would fetch one number after another."""
    rows, columns = x.shape
    size = math.gcd(32, rows, columns)
    squares = x.reshape(rows // size, size, columns // size, size).transpose(0, 2, 3, 1)
    return lax.optimization_barrier(lax.optimization_barrier(squares).transpose(1, 2, 0, 3).reshape(columns, rows))
