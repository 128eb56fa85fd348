"""Gated slot attention equals its two recurrences, one token at a time."""

from functools import partial

import jax
import jax.numpy as jnp

from tests.layers.random_layers import activations, randomize, relative_error
from tests.layers.recurrent.checks import forward
from zoo.models.hf.families.gsa_layers import GatedSlotAttention

EMBED, HEADS, KEY, VALUE, SLOTS = 12, 2, 3, 6, 4


def test_slots_equal_their_recurrences():
    layer = randomize(partial(GatedSlotAttention, EMBED, HEADS, key_dim=KEY, value_dim=VALUE, slots=SLOTS))
    x = activations(1, 7, EMBED)
    inputs = layer.projections
    query, key = (jax.nn.silu(linear(x[0])).reshape(-1, HEADS, KEY) for linear in (inputs.query, inputs.key))
    value = jax.nn.silu(inputs.value(x[0])).reshape(-1, HEADS, VALUE)
    decay = jax.nn.sigmoid(layer.forget(x[0])).reshape(-1, HEADS, SLOTS, 1) ** (1 / layer.temperature)
    keys, values = jnp.zeros((HEADS, SLOTS, KEY)), jnp.zeros((HEADS, SLOTS, VALUE))
    outputs = []
    for q, k, v, a in zip(query, key, value, decay, strict=True):
        keys = a * keys + (1 - a) * k[:, None]
        values = a * values + (1 - a) * v[:, None]
        shares = jax.nn.softmax(jnp.einsum("hmk,hk->hm", keys, q))
        outputs.append(jnp.einsum("hm,hmv->hv", shares, values))
    expected = layer.readout(jax.nn.silu(jnp.stack(outputs))[None], x)
    assert relative_error(forward(layer, x), expected) < 1e-5
