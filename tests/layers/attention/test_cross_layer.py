"""Attention that shares keys and values across layers equals a formula, and a cache in pieces."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import RMSNorm, TokenInfo
from zoo.layers.attention.cross_layer import CrossLayerAttention
from zoo.ops.rotary import ProportionalScaling, Rotary, apply_rotary

SCALING = ProportionalScaling(1, 2.0)
ROTARY, WINDOW, SEQ = Rotary(4, 100.0, False, SCALING), 3, 7


def compute_formula(layer, owner, x):
    """Attention of the queries of `layer` to the keys of `owner`; values are its keys before norm and RoPE."""
    cos, sin = ROTARY(jnp.arange(SEQ))
    split = lambda linear: (x @ linear.weight.T).reshape(*x.shape[:2], -1, 4)
    query = apply_rotary(layer.query_norm(split(layer.query)), cos, sin)
    key, value = apply_rotary(owner.key_norm(split(owner.key)), cos, sin), owner.value_norm(split(owner.key))
    key, value = jnp.repeat(key, 2, axis=2), jnp.repeat(value, 2, axis=2)
    age = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)
    scores = jnp.where((age >= 0) & (age < WINDOW), jnp.einsum("bqhd,bkhd->bhqk", query, key), -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), value)
    return mixed.reshape(*x.shape[:2], -1) @ layer.out.weight.T


def run_layers(layers, x, info, states):
    """Both layers on the same `x`, the second with the keys of the first."""
    (first, second), shared = layers, {}
    own, (state, shared) = first.mix(x, info, states[0], shared)
    reused, (unused, _) = second.mix(x, info, states[1], shared)
    return jnp.stack([own, reused]), (state, unused)


@eqx.filter_jit
def run_all(layers, x):
    states, outputs = tuple(layer.init_state(2, SEQ) for layer in layers), []
    assert (states[0].key.shape, states[1]) == ((2, 2, 3, 4), ())
    positions = jnp.broadcast_to(jnp.arange(SEQ), (2, SEQ))
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        output, states = run_layers(layers, x[:, start:stop], TokenInfo(positions[:, start:stop]), states)
        outputs.append(output)
    expected = jnp.stack([compute_formula(layer, layers[0], x) for layer in layers])
    return run_layers(layers, x, TokenInfo(), (None, None))[0], expected, jnp.concatenate(outputs, 2)


def test_shared_keys_equal_formula_and_cache():
    norms = {"qk_norm": lambda: RMSNorm(4), "value_norm": lambda: RMSNorm(4, scaled=False)}
    sizes = {"kv_heads": 2, "head_dim": 4, "scale": 1, "window": WINDOW, "rotary": ROTARY, "key_is_value": True}
    make = lambda **role: randomize(lambda key: CrossLayerAttention(16, 4, **norms, **sizes, **role, key=key))
    layers = make(stores="local"), make(reuses="local")
    ours, expected, cached = run_all(layers, activations(2, SEQ, 16))
    assert relative_error(ours, expected) < 1e-5
    assert relative_error(cached, expected) < 1e-5
    with pytest.raises(ValueError, match="no layer before it has stored"):
        layers[1](activations(2, SEQ, 16), TokenInfo())
    with pytest.raises(ValueError, match="has none to store"):
        make(stores="local", reuses="local")
