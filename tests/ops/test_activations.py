"""Activations against their formulas."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.ops.activations import ACTIVATIONS, clamped_swiglu, gaussian_top_k

FORMULAS = {
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu_squared": lambda x: max(x, 0) ** 2,
    "silu": lambda x: x / (1 + math.exp(-x)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_their_formulas(name):
    x = np.linspace(-4, 4, 33, dtype=np.float32)
    expected = [FORMULAS[name](float(v)) for v in x]
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.array(x)), expected, rtol=1e-5, atol=1e-6)


def test_clamped_swiglu_equals_its_formula():
    gates, ups = (x.reshape(-1) for x in np.meshgrid(np.linspace(-4, 4, 9), np.linspace(-4, 4, 9)))

    def formula(gate, up):
        gate, up = min(gate, 2.5), min(max(up, -2.5), 2.5)
        return (up + 1) * gate / (1 + math.exp(-1.5 * gate))

    given = partial(clamped_swiglu, alpha=1.5, limit=2.5)
    found = given(jnp.asarray(gates), jnp.asarray(ups))
    np.testing.assert_allclose(found, list(map(formula, gates, ups)), rtol=1e-5, atol=1e-6)
    to_gates, to_ups = jax.grad(lambda *x: given(*x).sum(), argnums=(0, 1))(jnp.asarray(gates), jnp.asarray(ups))
    assert (to_gates[gates > 2.5] == 0).all() and (to_gates[(gates < 2.5) & (ups != -1)] != 0).all()
    assert (to_ups[np.abs(ups) > 2.5] == 0).all() and (to_ups[(np.abs(ups) < 2.5) & (gates != 0)] != 0).all()


@pytest.mark.ci
def test_gaussian_top_k_keeps_what_is_above_the_quantile():
    x = np.random.default_rng(0).normal(3, 2, (2, 4096)).astype(np.float32)
    found = gaussian_top_k(jnp.asarray(x), 0.95)
    cutoff = x.mean(-1, keepdims=True) + 1.6448536 * x.std(-1, keepdims=True)
    np.testing.assert_allclose(found, np.maximum(x - cutoff, 0), rtol=1e-4, atol=1e-5)
    assert abs((found == 0).mean() - 0.95) < 0.01
    gradient = jax.grad(lambda x: gaussian_top_k(x, 0.95).sum())
    assert np.isfinite(gradient(jnp.zeros(4))).all(), "of equal features, whose deviation is 0"
    assert gaussian_top_k(jnp.ones(3, jnp.bfloat16), 0.5).dtype == jnp.bfloat16
