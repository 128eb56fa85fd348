"""A gated MLP with a sparse gate, on one device and with its features sharded."""

from functools import partial

import jax
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import GatedMLP, GaussianTopK
from zoo.ops.activations import gaussian_top_k, gelu_tanh


def test_sparse_gate_on_a_mesh_equals_formula():
    """The cutoff is that of all features, not of those on a device."""
    mlp, x = randomize(partial(GatedMLP, 8, 16, activation=GaussianTopK(0.7, gelu_tanh))), activations(2, 3, 8)
    gate, up = x @ mlp.gate.weight.T, x @ mlp.up.weight.T
    expected = (gelu_tanh(gaussian_top_k(gate, 0.7)) * up) @ mlp.down.weight.T
    mesh = zoo.make_mesh(data=2, tensor=4)
    sharded = zoo.spmd(lambda mlp, x: mlp(x)[0], mesh, out="batch seq embed")(zoo.place(mlp, mesh), x)
    assert relative_error(sharded, expected) < 1e-5


@pytest.mark.parametrize("sparsity", [0.0, 1.0])
def test_sparsity_without_a_quantile_raises(sparsity):
    with pytest.raises(ValueError, match="a sparsity is between 0 and 1"):
        GaussianTopK(sparsity, jax.nn.silu)
