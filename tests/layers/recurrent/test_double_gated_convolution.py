"""Double gated convolution against its formula. Its modes and states are tested with the other mixers."""

from functools import partial

import equinox as eqx
import numpy as np
import pytest

from tests.layers.random_layers import activations, randomize
from zoo.layers import DoubleGatedConvolution, TokenInfo


@pytest.mark.parametrize("bias", [False, True])
def test_double_gated_convolution_equals_its_formula(bias):
    layer = randomize(partial(DoubleGatedConvolution, 6, conv_width=4, bias=bias))
    x = np.asarray(activations(2, 7, 6))

    def project(linear, x):
        return x @ linear.weight.T + (linear.bias if bias else 0)

    gated = project(layer.input_gate, x) * project(layer.into, x)
    inputs = np.pad(gated, [(0, 0), (3, 0), (0, 0)])
    convolved = sum(inputs[:, k : k + 7] * layer.convolution.weight[:, k] for k in range(4))
    if bias:
        convolved = convolved + layer.convolution.bias
    y, state = eqx.filter_jit(layer)(x, TokenInfo())
    wanted = project(layer.out, project(layer.output_gate, x) * convolved)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    assert state is None
