"""Activations against their formulas."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from zoo.ops.activations import ACTIVATIONS, activation

FORMULAS = {
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0),
    "relu_squared": lambda x: max(x, 0) ** 2,
    "silu": lambda x: x / (1 + math.exp(-x)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_is_its_formula(name):
    x = np.linspace(-4, 4, 33, dtype=np.float32)
    expected = [FORMULAS[name](float(v)) for v in x]
    np.testing.assert_allclose(activation(name)(jnp.array(x)), expected, rtol=1e-5, atol=1e-6)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match=r"'swish'.*gelu, gelu_tanh, relu, relu_squared, silu"):
        activation("swish")
