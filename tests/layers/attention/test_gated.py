"""Gated attention equals its formula, and a cache in pieces."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import Attention, GatedAttention, TokenInfo
from zoo.ops.rotary import Rotary

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
    with pytest.raises(ValueError, match="4 heads do not share out over 3 kv_heads"):
        GatedAttention(16, 4, kv_heads=3, key=jax.random.key(0))


def test_a_gate_per_head_is_that_gate_for_each_of_its_channels():
    make = lambda key: GatedAttention(16, 4, **OPTIONS, per_head=True, activation=jax.nn.softplus, key=key)
    per_head = randomize(make)
    by_channel = GatedAttention(16, 4, **OPTIONS, activation=jax.nn.softplus, key=jax.random.key(0))
    parts = lambda node: (node.query, node.key, node.value, node.out, node.gate.weight)
    repeated = jnp.repeat(per_head.gate.weight, 4, axis=0)
    by_channel = eqx.tree_at(parts, by_channel, (*parts(per_head)[:-1], repeated))
    x = activations(2, 7, 16)
    ours, wanted = (eqx.filter_jit(layer)(x, TokenInfo())[0] for layer in (per_head, by_channel))
    assert per_head.gate.out_size == 4 and relative_error(ours, wanted) < 1e-6
