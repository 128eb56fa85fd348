"""Gated attention equals its formula, a cache in pieces and, with a gate per head, one device on meshes."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import Attention, GatedAttention, TokenInfo
from zoo.ops.rotary import Rotary
from zoo.tools.testing import check_mixer

OPTIONS = {"kv_heads": 2, "rotary": Rotary(4), "window": 3}


@eqx.filter_jit
def run_all(layer, x):
    """Return the outputs of the layer, of its formula, and through a cache in pieces."""
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
    identity = layer.out.with_weight(jnp.eye(16), None)
    ungated = eqx.tree_at(lambda node: (node.gate.weight, node.out), layer, (jnp.zeros((16, 16)), identity))
    heads = 2 * ungated(x, TokenInfo())[0]  # sigmoid(0) is a half
    expected = (jax.nn.sigmoid(x @ layer.gate.weight.T) * heads) @ layer.out.weight.T + layer.out.bias
    state, outputs = layer.init_state(2, 7), []
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        output, state = layer(x[:, start:stop], TokenInfo(positions[:, start:stop]), state)
        outputs.append(output)
    attention = randomize(lambda key: Attention(16, 4, **OPTIONS, bias=True, key=key))
    parts = lambda node: (node.query, node.key, node.value, node.out)
    attention = eqx.tree_at(parts, attention, (layer.query, layer.key, layer.value, identity))
    return layer(x, TokenInfo())[0], expected, jnp.concatenate(outputs, 1), heads, attention(x, TokenInfo())[0]


def test_gated_attention_equals_formula_and_cache():
    layer = randomize(lambda key: GatedAttention(16, 4, **OPTIONS, bias=True, out_bias=True, key=key))
    ours, expected, cached, heads, ungated = run_all(layer, activations(2, 7, 16))
    assert relative_error(heads, ungated) < 1e-5, "the heads of Attention with the same projections"
    assert relative_error(ours, expected) < 1e-5
    assert relative_error(cached, expected) < 1e-5
    with pytest.raises(ValueError, match="4 heads do not divide evenly over 3 kv_heads"):
        GatedAttention(16, 4, kv_heads=3, key=jax.random.key(0))


def test_gate_per_head_equals_equal_gates_of_its_channels():
    """With any activation, and with as many rows of the gate as heads."""
    options = {**OPTIONS, "activation": jax.nn.softplus}
    layer = randomize(lambda key: GatedAttention(16, 4, **options, per_head=True, key=key))
    assert layer.gate.weight.shape == (4, 16)
    wide = randomize(lambda key: GatedAttention(16, 4, **options, key=key))
    parts = lambda node: (node.query, node.key, node.value, node.out, node.gate.weight)
    repeated = jnp.repeat(layer.gate.weight, 4, axis=0)
    wide = eqx.tree_at(parts, wide, (*parts(layer)[:4], repeated))
    x = activations(2, 7, 16)
    assert relative_error(layer(x, TokenInfo())[0], wide(x, TokenInfo())[0]) < 1e-5


@pytest.mark.ci
def test_gate_per_head_keeps_its_promises():
    """By default a sigmoid, of which 0 is a half."""
    make = partial(GatedAttention, 16, 4, **OPTIONS, per_head=True)
    check_mixer(make, meshes=[zoo.make_mesh(data=2, context=2, tensor=2)])
    layer = randomize(make)
    closed = eqx.tree_at(lambda layer: layer.gate.weight, layer, jnp.zeros((4, 16)))
    heads = Attention(16, 4, **OPTIONS, key=jax.random.key(0))
    parts = lambda node: (node.query, node.key, node.value, node.out)
    heads = eqx.tree_at(parts, heads, parts(layer))
    x = activations(2, 7, 16)
    assert relative_error(2 * closed(x, TokenInfo())[0], heads(x, TokenInfo())[0]) < 1e-5
