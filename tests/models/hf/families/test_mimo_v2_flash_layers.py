"""Attention with scaled values of another size equals a formula, and a cache in pieces."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import TokenInfo
from zoo.models.hf.families.mimo_v2_flash_layers import ValueScaledAttention
from zoo.ops.rotary import Rotary, apply_rotary

ROTARY, WINDOW, SEQ = Rotary(2), 3, 7


def compute_formula(layer, x):
    """Attention with the whole mask; the sinks join the softmax, and add no value."""
    cos, sin = ROTARY(jnp.arange(SEQ))
    split = lambda linear, size: (x @ linear.weight.T).reshape(*x.shape[:2], -1, size)
    query, key, value = split(layer.query, 6), split(layer.key, 6), 0.7 * split(layer.value, 4)
    query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
    key, value = jnp.repeat(key, 2, axis=2), jnp.repeat(value, 2, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 6**0.5
    age = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)
    scores = jnp.where((age >= 0) & (age < WINDOW), scores, -jnp.inf)
    sinks = jnp.broadcast_to(layer.sinks[:, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1), axis=-1)[..., :-1]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(*x.shape[:2], -1) @ layer.out.weight.T


@eqx.filter_jit
def run_all(layer, x):
    state, outputs, positions = layer.init_state(2, SEQ), [], jnp.broadcast_to(jnp.arange(SEQ), (2, SEQ))
    assert (state.key.shape, state.value.shape) == ((2, 2, 3, 6), (2, 2, 3, 4))
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        output, state = layer(x[:, start:stop], TokenInfo(positions[:, start:stop]), state)
        outputs.append(output)
    return layer(x, TokenInfo())[0], compute_formula(layer, x), jnp.concatenate(outputs, 1)


def test_value_scaled_attention_equals_formula_and_cache():
    sizes = {"kv_heads": 2, "head_dim": 6, "value_dim": 4, "value_scale": 0.7}
    options = {"rotary": ROTARY, "window": WINDOW, "sinks": True}
    layer = randomize(lambda key: ValueScaledAttention(16, 4, **sizes, **options, key=key))
    ours, expected, cached = run_all(layer, activations(2, SEQ, 16))
    assert relative_error(ours, expected) < 1e-5
    assert relative_error(cached, expected) < 1e-5
    with pytest.raises(ValueError, match="value_dim is 0"):
        ValueScaledAttention(16, 4, value_dim=0, key=jax.random.key(0))
