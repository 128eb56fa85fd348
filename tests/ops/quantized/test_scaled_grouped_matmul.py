"""Grouped matmuls in FP8: each expert's rows and matrix are quantized as tensors of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.quantized import float64_recipes as reference
from zoo.ops.quantized.per_tensor import CurrentScaling
from zoo.ops.quantized.scaled_grouped_matmul import scaled_grouped_matmul

RANDOM = np.random.default_rng(0)
SIZES = (5, 0, 9, 3)
X, GRADIENT = (np.float32(RANDOM.normal(size=(20, size))) for size in (12, 16))
WEIGHT = np.float32(RANDOM.normal(size=(4, 16, 12)))


def test_grouped_products_match_the_float64_model():
    """With an expert without rows, experts of different magnitudes, and rows of no expert at the end."""
    x = X * np.repeat([1, 100, 1e-3, 1e6], [5, 9, 3, 3])[:, None].astype(np.float32)
    weight = WEIGHT * np.float32([1, 2, 1e3, 1e-4])[:, None, None]
    apply = lambda x, weight: scaled_grouped_matmul(x, weight, jnp.array(SIZES), CurrentScaling())

    @jax.jit
    def run(x, weight, gradient):
        y, pull_back = jax.vjp(apply, x, weight)
        return y, *pull_back(gradient)

    actual = run(x, weight, GRADIENT)
    e4m3, e5m2 = (
        (lambda z: reference.per_tensor(z, reference.E4M3)),
        (lambda z: reference.per_tensor(z, reference.E5M2)),
    )
    expected = np.zeros((20, 16)), np.zeros((20, 12)), np.zeros((4, 16, 12))
    start = 0
    for expert, size in enumerate(SIZES):
        if size:
            part = slice(start, start + size)
            products = reference.products(x[part], weight[expert], GRADIENT[part], e4m3, e4m3, e5m2)
            expected[0][part], expected[1][part], expected[2][expert] = products
        start += size
    for actual_part, z in zip(actual, expected, strict=True):
        scale = np.abs(z).max(-1, keepdims=True) + 1e-30
        assert (np.abs(np.asarray(actual_part) - z) <= 4e-6 * scale).all()


def test_other_recipes_refuse_experts():
    class Other(CurrentScaling):
        supports_experts = False

    with pytest.raises(NotImplementedError, match="Other quantizes no experts.*CurrentScaling"):
        scaled_grouped_matmul(jnp.asarray(X), jnp.asarray(WEIGHT), jnp.array(SIZES), Other())
