"""RWKV-4 time mixing equals its formula, decodes, and runs on a mesh."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from tests.layers.recurrent.checks import check_mesh_equals_one_device, decode, forward
from zoo.layers import RWKV4

KEY = jax.random.key(0)
EMBED, SEQ = 16, 7


def make_time_mixing(**options):
    return randomize(partial(RWKV4, EMBED, inner=24, **options), power=-0.25)


def naive_time_mixing(layer, x):
    """Compute the formulas of the docstring, one token at a time."""
    previous = jnp.pad(x, [(0, 0), (1, 0), (0, 0)])[:, :-1]
    lerp = lambda mix: mix * x + (1 - mix) * previous
    k, v = jnp.exp(layer.key(lerp(layer.key_mix))), layer.value(lerp(layer.value_mix))
    n, d, out = jnp.zeros_like(k[:, 0]), jnp.zeros_like(k[:, 0]), []
    for t in range(x.shape[1]):
        current = jnp.exp(layer.bonus) * k[:, t]
        out.append((n + current * v[:, t]) / (d + current))
        decay = jnp.exp(-jnp.exp(layer.decay))
        n, d = decay * n + k[:, t] * v[:, t], decay * d + k[:, t]
    return layer.out(jax.nn.sigmoid(layer.receptance(lerp(layer.receptance_mix))) * jnp.stack(out, 1))


def test_rwkv4_equals_its_formula_in_both_modes():
    layer, x = make_time_mixing(), activations(2, SEQ, EMBED)
    expected = eqx.filter_jit(naive_time_mixing)(layer, x)
    assert relative_error(forward(layer, x), expected) < 1e-5
    assert relative_error(forward(make_time_mixing(implementation="recurrent"), x), expected) < 1e-5


@pytest.mark.slow
def test_rwkv4_on_a_mesh_equals_one_device():
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    check_mesh_equals_one_device(make_time_mixing(), activations(4, SEQ, EMBED), mesh)


def test_rwkv4_in_bfloat16_keeps_a_float32_state():
    layer, x = zoo.cast(make_time_mixing(), jnp.bfloat16), activations(2, SEQ, EMBED)
    positions = jnp.arange(SEQ)[None].repeat(2, 0)
    y, state = decode(layer, layer.init_state(2, SEQ, jnp.bfloat16), x.astype(jnp.bfloat16), positions)
    assert y.dtype == jnp.bfloat16
    assert relative_error(y.astype(jnp.float32), forward(make_time_mixing(), x)) < 0.1
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"float32", "bfloat16"}
    assert layer.decay.dtype == jnp.float32


def test_rwkv4_rejects_impossible_sizes():
    with pytest.raises(ValueError, match="inner is 0, and a size is at least 1"):
        RWKV4(EMBED, inner=0, key=KEY)
