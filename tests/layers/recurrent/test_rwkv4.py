"""RWKV-4 time mixing and channel mixing equal their formulas, decode, and run on a mesh."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from tests.layers.recurrent.checks import check_mesh_equals_one_device, decode, forward
from zoo.layers import RWKV4, RWKV4ChannelMixing, TokenInfo

KEY = jax.random.key(0)
EMBED, SEQ = 16, 7


def make_time_mixing(**options):
    return randomize(partial(RWKV4, EMBED, inner=24, **options), power=-0.25)


def make_channel_mixing():
    return randomize(partial(RWKV4ChannelMixing, EMBED, mlp=24), power=-0.25)


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


def naive_channel_mixing(layer, x):
    previous = jnp.pad(x, [(0, 0), (1, 0), (0, 0)])[:, :-1]
    lerp = lambda mix: mix * x + (1 - mix) * previous
    value = layer.value(jax.nn.relu(layer.key(lerp(layer.key_mix))) ** 2)
    return jax.nn.sigmoid(layer.receptance(lerp(layer.receptance_mix))) * value


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


def test_channel_mixing_equals_its_formula():
    layer, x = make_channel_mixing(), activations(2, SEQ, EMBED)
    expected = eqx.filter_jit(naive_channel_mixing)(layer, x)
    assert relative_error(forward(layer, x), expected) < 1e-5


def test_channel_mixing_decodes_what_a_forward_pass_computes():
    """One token at a time and in unequal chunks; one row is padded on the left, at first and again later."""
    layer, x = make_channel_mixing(), activations(2, SEQ, EMBED)
    padded = x.at[1, :2].set(7.0).at[1, 4].set(-5.0)  # padding may hold any values
    is_real = np.ones((2, SEQ), bool)
    is_real[1, [0, 1, 4]] = False
    expected = np.zeros((2, SEQ, EMBED), np.float32)
    for row in range(2):
        expected[row, is_real[row]] = forward(layer, padded[row : row + 1, is_real[row]])[0]
    positions = jnp.asarray(np.where(is_real, is_real.cumsum(1) - 1, -1))
    for chunk_sizes in ([1] * SEQ, [4, 3]):
        state, start = layer.init_state(2, SEQ), 0
        shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
        for size in chunk_sizes:
            chunk = slice(start, start + size)
            y, state = decode(layer, state, padded[:, chunk], positions[:, chunk])
            error = np.abs(np.asarray(y) - expected[:, chunk])[is_real[:, chunk]].max()
            assert error < 1e-5 * np.abs(expected).max()
            assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == shapes
            start += size


def test_channel_mixing_packed_equals_separate():
    layer, x = make_channel_mixing(), activations(2, SEQ, EMBED)
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 2]] * 2)
    packed = forward(layer, x, TokenInfo(zoo.models.pack_positions(segments), segments))
    for document in (slice(0, 4), slice(4, 7)):
        assert relative_error(packed[:, document], forward(layer, x[:, document])) < 1e-5


def test_channel_mixing_is_causal_and_sees_one_previous_token():
    layer, x = make_channel_mixing(), activations(1, SEQ, EMBED)
    jacobian = jax.jit(jax.jacobian(lambda x: layer(x, TokenInfo())[0][0].sum(-1)))(x)[:, 0]
    has_gradient = jnp.abs(jacobian).max(-1) > 0
    expected = jnp.tril(jnp.ones((SEQ, SEQ), bool)) & ~jnp.tril(jnp.ones((SEQ, SEQ), bool), -2)
    assert (has_gradient == expected).all()
