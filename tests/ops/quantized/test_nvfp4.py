"""NVFP4 against a float64 model, its stochastic rounding, and the Hadamard transform."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.quantized import float64_recipes as reference
from tests.ops.quantized.test_scaled_matmul import GRADIENT, WEIGHT, X, run
from zoo.ops.quantized.fp8 import dequantize
from zoo.ops.quantized.groups import get_nvfp4_dequantizer
from zoo.ops.quantized.hadamard import SIGNS, make_hadamard, transform_tokens
from zoo.ops.quantized.nvfp4 import NVFP4, pack_nvfp4


def test_products_match_the_float64_model():
    """Rounding to nearest. Ties of E2M1 may go either way where the transform is summed in another order."""
    x, gradient = (z.reshape(-1, z.shape[-1]) for z in (X, GRADIENT))
    tile, block = partial(reference.nvfp4, rows=1, columns=16), partial(reference.nvfp4, rows=16, columns=16)
    turn = lambda z: tile(reference.hadamard(z.T, SIGNS), amax=4 * np.abs(z).max())
    expected = tile(x) @ block(WEIGHT).T, tile(gradient) @ block(WEIGHT), turn(gradient) @ turn(x).T
    actual = run(NVFP4(stochastic=False), 1, X, WEIGHT, GRADIENT)
    for y, z in zip(actual[:2], expected[:2], strict=True):
        assert np.abs(np.asarray(y).reshape(z.shape) - z).max() <= 2e-6 * np.abs(z).max()
    error = np.abs(np.asarray(actual[2]) - expected[2]) / np.abs(expected[2]).max()
    assert np.median(error) < 1e-6 and (error < 1e-5).mean() > 0.9


def test_packed_matrix_is_the_float64_model():
    weight = np.array(WEIGHT)
    weight[0, :16] = 0
    codes, constants, whole = jax.jit(pack_nvfp4)(weight)
    assert codes.dtype == constants.dtype == jnp.uint8 and codes.shape == (*weight.shape[:1], weight.shape[1] // 2)
    assert whole == pytest.approx([6 * 448 / np.abs(weight).max()])
    decoded = jax.jit(get_nvfp4_dequantizer(indexed=False))(codes, constants, whole)
    expected = reference.nvfp4(np.asarray(weight), rows=1, columns=16)
    np.testing.assert_allclose(decoded, expected, rtol=1e-6)
    weight[0, 0] = np.inf
    assert np.isnan(jax.jit(pack_nvfp4)(weight)[2]).all()


def test_transform_is_orthogonal_and_spreads_outliers():
    matrix = make_hadamard(16)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(16), atol=1e-6)
    x = jnp.zeros((1, 20, 2)).at[0, 3].set(jnp.array([8.0, -4.0]))
    turned = transform_tokens(x)
    assert turned.shape == (1, 32, 2)
    np.testing.assert_allclose(np.abs(turned[0, :16]), [[2.0, 1.0]] * 16, rtol=1e-6)
    assert (turned[0, 16:] == 0).all()
    y = jax.random.normal(jax.random.key(0), (1, 20, 3))
    np.testing.assert_allclose(
        jnp.einsum("btf,btg->fg", turned, transform_tokens(y)), jnp.einsum("btf,btg->fg", x, y), atol=1e-5
    )


@pytest.mark.parametrize("axis", [pytest.param(-1, marks=pytest.mark.slow), -2])
def test_gradients_are_rounded_without_bias(axis):
    """The mean of 4,096 roundings is within five standard errors of the value, which is at most half a spacing wide."""
    gradient = jnp.asarray(np.random.default_rng(0).normal(size=(1, 16, 16)), jnp.float32)
    recipe, amax = NVFP4(), jnp.abs(gradient).max()
    exact = gradient if axis == -1 else transform_tokens(gradient)
    bits = jax.random.bits(jax.random.key(1), (4096, 1, 16, 16), jnp.uint32)
    rounded = jax.jit(jax.vmap(lambda bits: dequantize(recipe.quantize_gradient(gradient, amax, axis, bits))))(bits)
    mean, deviation = np.mean(np.float64(rounded), 0), np.std(np.float64(rounded), 0)
    # A block's largest value is rounded down where its scale was: at most half a spacing of E4M3.
    tolerance = 5 * deviation / 64 + np.where(deviation == 0, 2.0**-4 * np.abs(exact), 1e-6)
    assert (np.abs(mean - exact) <= tolerance).mean() > 0.99
    nearest = dequantize(NVFP4(stochastic=False).quantize_gradient(gradient, amax, axis, None))
    assert np.abs(mean - exact).mean() < 0.3 * np.abs(nearest - exact).mean()


def test_gradient_without_keys_raises():
    with pytest.raises(ValueError, match="NVFP4 rounds gradients stochastically.*stochastic=False"):
        run(NVFP4(), 1, X, WEIGHT, GRADIENT)
