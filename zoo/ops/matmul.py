"""Matrix products with float32 accumulation, rounded once, in the forward pass and in the gradient.

`jnp.einsum` falls short twice. XLA's CPU backend uses a processor's bfloat16 units (AVX-512 BF16, AMX) only where the
operands are bfloat16 and the result float32; for a bfloat16 result it converts to float32 first: 190 instead of 430
GFLOP/s on two cores of an EPYC (jax 0.10). And for a float32 result, as attention scores are, JAX's gradient multiplies
float32 by bfloat16, which no matrix unit supports.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .custom_vjps import refuse_forward_mode, run_in_rule
from .implementations import always_holds
from .platform import current_platform
from .varying import align_varying

_HALF_DTYPES = (jnp.bfloat16, jnp.float16)
_FEW_ROWS = 64
"""Up to this many rows, a product takes the weight matrix first and the rows second (`_has_few_rows`)."""


def einsum_fp32_accum(
    spec: str, x: Float[Array, "..."], y: Float[Array, "..."], *, dtype: Any = None, custom_vjp: bool = True
) -> Float[Array, "..."]:
    """Compute `jnp.einsum(spec, x, y)` with float32 accumulation; `dtype` defaults to the operands'.

    Every letter of `spec` is in two of its three terms, or in all three for a batch dim, so that a gradient is an
    einsum with the terms exchanged. In half precision, cotangents are rounded to the operands' dtype before the product
    and after it, whatever `dtype` is, by a custom VJP. Rules of other custom VJPs pass `custom_vjp=False`: nothing in
    them is differentiated for a gradient, and for a second derivative forward over reverse.

    **Raises** `ValueError` for a letter in one term only.
    """
    left, right, out = _parse_einsum_terms(spec)
    if dtype is None:
        dtype = jnp.result_type(x, y)
    if x.dtype != y.dtype or x.dtype not in _HALF_DTYPES:
        return einsum_dot_general(left, right, out, x, y, dtype)
    if not custom_vjp:
        return einsum_round_once(left, right, out, x, y, dtype)
    x, y = refuse_forward_mode((x, y), f"a product in {x.dtype.name}", "compute in float32")
    return _half_precision_einsum((left, right, out, dtype), *align_varying(x, y))


def _parse_einsum_terms(spec: str) -> tuple[str, str, str]:
    """Parse `"ab,cb->ac"` into its three terms."""
    operands, _, out = spec.partition("->")
    left, _, right = operands.partition(",")
    unpaired = [letter for letter in set(left + right + out) if (left + right + out).count(letter) < 2]
    if unpaired or not (left and right and out):
        raise ValueError(
            f"einsum_fp32_accum: {spec!r} is not a product of two arrays with each letter in two terms or in three"
        )
    return left, right, out


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _half_precision_einsum(
    terms_and_dtype: tuple[str, str, str, Any], x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Compute the einsum of two half-precision arrays; `terms_and_dtype` are its three terms and the result's dtype."""
    left, right, out, dtype = terms_and_dtype
    return einsum_round_once(left, right, out, x, y, dtype)


def _half_precision_einsum_fwd(
    terms_and_dtype: tuple[str, str, str, Any], x: Float[Array, "..."], y: Float[Array, "..."]
) -> tuple:
    """Return the product, and the operands as residuals."""
    return run_in_rule(_half_precision_einsum, terms_and_dtype, x, y), (x, y)


def _half_precision_einsum_bwd(
    terms_and_dtype: tuple[str, str, str, Any], residuals: tuple, gradient: Float[Array, "..."]
) -> tuple:
    """Return both cotangents: einsums with the terms exchanged."""
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
    """Compute y + W x as one operation with a custom VJP.

    Rematerialization policies that save matrix products then save only the sum, neither y nor W x.
    """
    flat = lambda z: z.reshape(-1, z.shape[-1])
    y, x, weight = refuse_forward_mode((y, x, weight), "add_matmul")
    return _add_matmul_custom_vjp(*align_varying(flat(y), flat(x), weight)).reshape(y.shape)


@jax.custom_vjp
def _add_matmul_custom_vjp(
    y: Float[Array, "rows out"], x: Float[Array, "rows in"], weight: Float[Array, "out in"]
) -> Float[Array, "rows out"]:
    """Compute `add_matmul` of operands that vary over the same mesh axes."""
    return y + einsum_fp32_accum("ri,oi->ro", x, weight, custom_vjp=False).astype(y.dtype)


def _add_matmul_fwd(
    y: Float[Array, "rows out"], x: Float[Array, "rows in"], weight: Float[Array, "out in"]
) -> tuple[Float[Array, "rows out"], tuple]:
    """Return the sum, and x and the weight as residuals."""
    return run_in_rule(_add_matmul_custom_vjp, y, x, weight), (x, weight)


def _add_matmul_bwd(residuals: tuple, gradient: Float[Array, "rows out"]) -> tuple:
    """Return the cotangents: the incoming one for y, and products for x and the weight."""
    x, weight = residuals
    rounded = gradient.astype(x.dtype)
    x_gradient = einsum_fp32_accum("ro,oi->ri", rounded, weight, custom_vjp=False)
    return gradient, x_gradient, einsum_fp32_accum("ro,ri->oi", rounded, x, custom_vjp=False)


_add_matmul_custom_vjp.defvjp(_add_matmul_fwd, _add_matmul_bwd)


def einsum_round_once(
    left: str, right: str, out: str, x: Float[Array, "..."], y: Float[Array, "..."], dtype: Any
) -> Float[Array, "..."]:
    """Compute an einsum with float32 accumulation and round once to `dtype`, after the product on CPUs."""
    if current_platform() != "cpu":
        return einsum_dot_general(left, right, out, x, y, dtype)
    is_over_rows = len(left) == len(right) == len(out) == 2 and left[0] == right[0]
    if is_over_rows:  # the fast kernels do not support a contraction over the rows of both
        if left[1] != out[0]:
            x, y, left, right = y, x, right, left
        x = blocked_transpose(x)
        left = left[::-1]
    return einsum_dot_general(left, right, out, x, y, jnp.float32).astype(dtype)


def einsum_dot_general(
    left: str, right: str, out: str, x: Float[Array, "..."], y: Float[Array, "..."], dtype: Any
) -> Float[Array, "..."]:
    """Compute an einsum as one `dot_general`, followed by a transpose if its dims come in another order."""
    batch = [letter for letter in left if letter in right and letter in out]
    contracted = [letter for letter in left if letter in right and letter not in out]
    swapped = _has_few_rows(left, right, contracted, x, y)
    if swapped:
        left, right, x, y = right, left, y, x
    dims = [*batch, *(letter for letter in left + right if letter in out and letter not in batch)]

    def find_dims(letters: list[str]) -> tuple[list[int], list[int]]:
        return [left.index(letter) for letter in letters], [right.index(letter) for letter in letters]

    product = lax.dot_general(x, y, (find_dims(contracted), find_dims(batch)), preferred_element_type=dtype)
    if swapped:
        product = lax.optimization_barrier(product)  # else XLA swaps them back
    if dims == list(out):
        return product
    return product.transpose([dims.index(letter) for letter in out])


def _has_few_rows(left: str, right: str, contracted: list[str], x: Array, y: Array) -> bool:
    """Return whether a weight matrix should come first: XLA's CPU backend repacks the second operand of a float32
    product at every call, so the few rows of a decoding step should come second."""
    if current_platform() != "cpu" or x.dtype in _HALF_DTYPES or not len(left) == len(right) == 2:
        return False
    if len(contracted) != 1:
        return False
    rows, columns = (z.size // z.shape[term.index(contracted[0])] for z, term in ((x, left), (y, right)))
    return always_holds(lambda: 1 < rows <= _FEW_ROWS < columns)


def einsum_in_dtype(
    left: str, right: str, out: str, x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Compute an einsum with float32 accumulation, rounded to the dtype of `x`."""
    einsum = einsum_round_once if x.dtype in _HALF_DTYPES else einsum_dot_general
    return einsum(left, right, out, x, y, x.dtype)


def blocked_transpose(x: Float[Array, "rows columns"]) -> Float[Array, "columns rows"]:
    """Materialize `x.T` block by block: XLA's CPU backend would transpose one element at a time."""
    rows, columns = x.shape
    size = math.gcd(32, rows, columns)
    blocks = x.reshape(rows // size, size, columns // size, size).transpose(0, 2, 3, 1)
    return lax.optimization_barrier(lax.optimization_barrier(blocks).transpose(1, 2, 0, 3).reshape(columns, rows))
