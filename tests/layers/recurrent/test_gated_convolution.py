"""Gated short convolution against its formula. Its modes and states are tested with the other mixers."""

import equinox as eqx
import numpy as np

from tests.layers.random_layers import activations, randomize
from zoo.layers import GatedConvolution, TokenInfo


def test_gated_convolution_equals_its_formula():
    layer = randomize(lambda key: GatedConvolution(6, key=key))
    x = np.asarray(activations(2, 7, 6))
    gate = x @ layer.gate.weight.T + layer.gate.bias
    inputs = np.pad(x @ layer.into.weight.T, [(0, 0), (2, 0), (0, 0)])
    convolved = sum(inputs[:, k : k + 7] * layer.convolution.weight[:, k] for k in range(3)) + layer.convolution.bias
    y, state = eqx.filter_jit(layer)(x, TokenInfo())
    np.testing.assert_allclose(y, (gate * convolved) @ layer.out.weight.T, rtol=1e-4, atol=1e-5)
    assert state is None
