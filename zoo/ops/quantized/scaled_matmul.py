"""The three products of a linear layer in low precision, as one custom VJP.

    y  = Q(W) Q(x)            inputs and weights, contracted over the features of x
    dx = Q(W)ᵀ Q(g)           weights and gradients, contracted over the features of y
    dW = Q(g) Q(x)ᵀ           gradients and inputs, contracted over tokens

A recipe defines Q for each operand and contracted dim. Sums are float32, rounded once to the dtype of x and W. The
residuals are the weight itself and x as dW needs it, in the narrow format. The weight is quantized again in the
backward pass, so an all-gathered parameter is never saved.

FLOPs: 6 tokens in out. Bytes: the operands at one byte per value, and the float32 results.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from ..custom_vjps import refuse_forward_mode, refuse_second_derivative
from ..dropout import random_bits
from ..varying import vary, varying
from .fp8 import StoredTensor, find_amax, multiply_scaled
from .recipe import AbstractRecipe

_SECOND_DRAW = 2**31
"""Offset of the token index in the random bits of a gradient's second rounding, for dW."""


class AmaxArrays(NamedTuple):
    """Histories of the maxima of a layer's three tensors, the latest first, for delayed scaling."""

    input: Float[Array, "history"]
    weight: Float[Array, "history"]
    gradient: Float[Array, "history"]


class NoiseKeys(NamedTuple):
    """Keys of stochastic rounding, and the global indices of the first value of a gradient."""

    keys: UInt32[Array, "batch 2"]
    token_offset: int | Int[Array, ""]
    feature_offset: int | Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class MeasuredAxes:
    """Mesh axes that shard each tensor, over which its maximum is taken."""

    input: tuple[str, ...] = ()
    weight: tuple[str, ...] = ()
    gradient: tuple[str, ...] = ()


class _Options(NamedTuple):
    """Static arguments of both passes."""

    recipe: AbstractRecipe
    dim: int
    axes: MeasuredAxes
    input_dtype: Any


def scaled_matmul(
    x: Float[Array, "batch tokens k"],
    weight: Float[Array, "_ _"],
    dim: int,
    recipe: AbstractRecipe,
    *,
    axes: MeasuredAxes | None = None,
    history: AmaxArrays | None = None,
    noise: NoiseKeys | None = None,
) -> Float[Array, "batch tokens n"]:
    """Contract the last dim of `x` with dim 0 or 1 of the weight, in the formats of `recipe`, forward and backward.

    - `axes`: mesh axes that shard the tensors; none by default.
    - `history`: maxima of earlier steps, for delayed scaling. Its cotangent is not a gradient: element 0 is the maximum
      of this call, the others are 0.
    - `noise`: keys of stochastic rounding.

    **Raises** `ValueError` in the backward pass for a recipe that rounds stochastically without `noise`.
    """
    known = frozenset().union(*(varying(z) for z in (x, weight, *(history or ()))))
    x, weight = vary((x, weight), known)
    x, weight = refuse_forward_mode((x, weight), *name_product(recipe))
    options = _Options(recipe, dim, axes or MeasuredAxes(), x.dtype)
    return _scaled_matmul(options, x, weight, history, noise)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled_matmul(
    options: _Options, x: Array, weight: Array, history: AmaxArrays | None, noise: NoiseKeys | None
) -> Float[Array, "batch tokens n"]:
    """Compute `scaled_matmul` of operands that vary over the same mesh axes."""
    return _scaled_matmul_fwd(options, x, weight, history, noise)[0]


def _scaled_matmul_fwd(
    options: _Options, x: Array, weight: Array, history: AmaxArrays | None, noise: NoiseKeys | None
) -> tuple[Array, tuple]:
    """Return the product, and the residuals of the gradient."""
    recipe, dim, axes, _ = options
    x, weight = refuse_second_derivative((x, weight), *name_product(recipe))
    if history is None:
        amax = recipe.measure(x, axes.input)
        weight_amax = recipe.measure(weight, axes.weight)
    else:
        amax = recipe.read_history(history.input)
        weight_amax = recipe.read_history(history.weight)
    quantized = recipe.quantize_input(x, amax, -1), recipe.quantize_weight(weight, weight_amax, dim - 2)
    terms = "nk" if dim == 1 else "kn"
    y = multiply_scaled("rk", terms, "rn", *quantized)
    y = y.astype(jnp.result_type(x, weight)).reshape(*x.shape[:-1], -1)
    seen = None if history is None else _record_amax(history.input, x)
    return y, (StoredTensor(recipe.quantize_input(x, amax, -2)), weight, weight_amax, seen, history, noise)


def _scaled_matmul_bwd(options: _Options, residuals: tuple, gradient: Float[Array, "batch tokens n"]) -> tuple:
    """Return the cotangents of x and the weight and, as the cotangents of the histories, the maxima of this call."""
    recipe, dim, axes, input_dtype = options
    stored, weight, weight_amax, input_seen, history, noise = residuals
    gradient = refuse_second_derivative(gradient, *name_product(recipe))
    if history is None:
        amax = recipe.measure(gradient, axes.gradient)
    else:
        amax = recipe.read_history(history.gradient)
    by_features = recipe.quantize_gradient(gradient, amax, -1, _draw_bits(recipe, noise, gradient, 0))
    by_tokens = recipe.quantize_gradient(gradient, amax, -2, _draw_bits(recipe, noise, gradient, _SECOND_DRAW))
    transposed = recipe.quantize_weight(weight, weight_amax, 1 - dim - 2)
    terms = "nk" if dim == 1 else "kn"
    x_gradient = multiply_scaled("rn", terms, "rk", by_features, transposed)
    x = stored.restore()
    if dim == 1:
        weight_gradient = multiply_scaled("rn", "rk", terms, by_tokens, x)
    else:
        weight_gradient = multiply_scaled("rk", "rn", terms, x, by_tokens)
    seen = None
    if history is not None:
        seen = AmaxArrays(input_seen, _record_amax(history.weight, weight), _record_amax(history.gradient, gradient))
    x_gradient = x_gradient.astype(input_dtype).reshape(*gradient.shape[:-1], -1)
    return x_gradient, weight_gradient.astype(weight.dtype), seen, None


_scaled_matmul.defvjp(_scaled_matmul_fwd, _scaled_matmul_bwd)


def name_product(recipe: AbstractRecipe) -> tuple[str, str]:
    """Return what errors of missing derivatives name. Rounding is constant nearly everywhere, so the derivative of a
    gradient through it has no meaning."""
    return f"a product in the formats of {type(recipe).__name__}", "zoo.precision.remove_fp8(model) has one"


def _record_amax(history: Float[Array, "history"], x: Float[Array, "*dims"]) -> Float[Array, "history"]:
    """Return zeros with max |x| as element 0, over the mesh axes that x varies over and the history does not."""
    amax = find_amax(x)
    missing = tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in varying(amax))
    missing = tuple(axis for axis in missing if axis not in varying(history))
    if missing:
        amax = lax.pmax(amax, missing)
    return vary(jnp.zeros_like(history).at[0].set(amax.astype(history.dtype)), varying(history))


def _draw_bits(
    recipe: AbstractRecipe, noise: NoiseKeys | None, gradient: Float[Array, "batch tokens n"], draw: int
) -> UInt32[Array, "batch _ n"] | None:
    """Return random bits for a gradient whose tokens are padded to whole blocks; None for a recipe without noise."""
    if not recipe.rounds_stochastically:
        return None
    if noise is None:
        raise ValueError(
            f"{type(recipe).__name__} rounds gradients stochastically, and this layer has no PRNG keys: give the "
            "model a key, as `zoo.value_and_grad(...)(..., key=key)` does and the loss passes on, or take the recipe "
            "with stochastic=False"
        )
    tokens = -(-gradient.shape[1] // recipe.block_size) * recipe.block_size
    token_offset = jnp.asarray(noise.token_offset).astype(jnp.uint32) + jnp.uint32(draw)
    return random_bits(noise.keys, (tokens, gradient.shape[2]), token_offset, noise.feature_offset)
