"""Grouped matrix products of experts in FP8, with one scale for each expert's rows and one for its matrix.

    y[r] = Q(W[e]) Q(x[r])        for rows r of expert e, sorted

As in Transformer Engine's `GroupedLinear`, a tensor is one expert's matrix, or the rows of one expert. FP8 values are
exact in float32 and in TF32. So an implementation of the grouped matmul multiplies the decoded values and scales the
product afterwards, which gives the result of FP8 kernels up to the order of sums.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..custom_vjps import refuse_second_derivative
from ..moe.grouped_matmul import find_row_experts, grouped_matmul
from ..varying import align_varying
from .fp8 import ScaledTensor, StoredTensor
from .recipe import AbstractRecipe
from .scaled_matmul import MeasuredAxes, name_product


def scaled_grouped_matmul(
    x: Float[Array, "rows in"],
    weight: Float[Array, "experts out in"],
    sizes: Int[Array, "experts"],
    recipe: AbstractRecipe,
    *,
    axes: MeasuredAxes | None = None,
) -> Float[Array, "rows out"]:
    """Compute W[e] x for each row, forward and backward in the formats of a recipe with one scale per tensor. Rows
    beyond sum(sizes) give zeros.

    - `axes`: mesh axes that shard the rows, the matrices and the rows of the gradient; none by default.

    **Raises** `NotImplementedError` for a recipe with block scales or delayed scaling.
    """
    if not recipe.supports_experts:
        raise NotImplementedError(
            f"{type(recipe).__name__} quantizes no experts: their rows are sorted anew at every step. Take "
            "CurrentScaling, or targets without the experts"
        )
    options = recipe, axes or MeasuredAxes()
    return _scaled_grouped_matmul(options, *align_varying(x, weight, sizes))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled_grouped_matmul(
    options: tuple[AbstractRecipe, MeasuredAxes], x: Array, weight: Array, sizes: Array
) -> Float[Array, "rows out"]:
    """Compute `scaled_grouped_matmul` of operands that vary over the same mesh axes."""
    return _scaled_grouped_matmul_fwd(options, x, weight, sizes)[0]


def _scaled_grouped_matmul_fwd(
    options: tuple[AbstractRecipe, MeasuredAxes], x: Array, weight: Array, sizes: Array
) -> tuple[Array, tuple]:
    """Return the product, and the rows in FP8 with their scales, the matrices and their maxima as residuals."""
    recipe, axes = options
    x, weight = refuse_second_derivative((x, weight), *name_product(recipe))
    weight_amax = _reduce_max(jnp.abs(weight).max((1, 2)).astype(jnp.float32), axes.weight)
    rows = recipe.quantize_input(x, _find_row_amax(x, sizes, axes.input), -1)
    matrices = recipe.quantize_weight(weight, weight_amax[:, None, None], -1)
    y = grouped_matmul(_decode(rows), _decode(matrices), sizes)
    y = y * (rows.scale * _expand(matrices.scale[:, 0], sizes, len(x)))
    return y.astype(jnp.result_type(x, weight)), (StoredTensor(rows), jnp.zeros(0, x.dtype), weight, weight_amax, sizes)


def _scaled_grouped_matmul_bwd(
    options: tuple[AbstractRecipe, MeasuredAxes], residuals: tuple, gradient: Float[Array, "rows out"]
) -> tuple:
    """Return the cotangents of the rows and the matrices."""
    recipe, axes = options
    stored, like_x, weight, weight_amax, sizes = residuals
    gradient = refuse_second_derivative(gradient, *name_product(recipe))
    rows = stored.restore()
    matrices = recipe.quantize_weight(weight, weight_amax[:, None, None], -2)
    gradients = recipe.quantize_gradient(gradient, _find_row_amax(gradient, sizes, axes.gradient), -1, None)
    # The product is linear in both operands: its gradients multiply the FP8 values, and the scales come after.
    _, pull_back = jax.vjp(lambda x, weight: grouped_matmul(x, weight, sizes), _decode(rows), _decode(matrices))
    x_gradient, weight_gradient = pull_back(_decode(gradients))
    x_gradient = x_gradient * (gradients.scale * _expand(matrices.scale[:, 0], sizes, len(gradient)))
    scale = _first_of_group(rows.scale * gradients.scale, sizes)
    return x_gradient.astype(like_x.dtype), (weight_gradient * scale[..., None]).astype(weight.dtype), None


_scaled_grouped_matmul.defvjp(_scaled_grouped_matmul_fwd, _scaled_grouped_matmul_bwd)


def _decode(x: ScaledTensor) -> Float[Array, "..."]:
    return x.values.astype(jnp.float32)


def _reduce_max(amax: Float[Array, "experts"], axes: tuple[str, ...]) -> Float[Array, "experts"]:
    if not axes:
        return amax
    return lax.pmax(amax, axes)


def _find_row_amax(
    x: Float[Array, "rows features"], sizes: Int[Array, "experts"], axes: tuple[str, ...]
) -> Float[Array, "rows 1"]:
    """Return for each row the maximum over all rows of its expert; 0 for rows beyond all groups."""
    expert = find_row_experts(sizes, len(x))
    amax = jnp.zeros(len(sizes)).at[expert].max(jnp.abs(x).max(1).astype(jnp.float32), mode="drop")
    return _expand(_reduce_max(amax, axes)[:, None], sizes, len(x))


def _expand(values: Float[Array, "experts 1"], sizes: Int[Array, "experts"], rows: int) -> Float[Array, "rows 1"]:
    """Return the value of each row's expert; 0 for rows beyond all groups."""
    return jnp.append(values, 0)[find_row_experts(sizes, rows)][:, None]


def _first_of_group(values: Float[Array, "rows 1"], sizes: Int[Array, "experts"]) -> Float[Array, "experts 1"]:
    """Return the value of the first row of each expert, which all its rows share."""
    return values[jnp.minimum(jnp.cumsum(sizes) - sizes, len(values) - 1)]
