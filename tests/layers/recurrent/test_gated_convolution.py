"""Gated short convolution against its formula. Its modes and states are tested with the other mixers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import zoo
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


def test_a_shard_looks_back_into_the_shard_before():
    """As far as its document reaches: the second row has one that begins just before the border."""
    layer, x = randomize(lambda key: GatedConvolution(6, key=key)), activations(2, 8, 6)
    segment_ids = jnp.array([[1] * 8, [1] * 3 + [2] * 5])
    run = lambda layer, x, ids: layer(x, TokenInfo(segment_ids=ids))[0]
    mesh = zoo.make_mesh(1, context=2, devices=jax.devices()[:2])
    found = zoo.spmd(run, mesh, out="batch seq embed")(layer, x, segment_ids)
    np.testing.assert_allclose(found, eqx.filter_jit(run)(layer, x, segment_ids), rtol=1e-4, atol=1e-5)
