"""RWKV-4 channel mixing equals its formula and decodes; the layer around it rescales its stream."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.layers.random_layers import activations, randomize, relative_error
from tests.layers.recurrent.checks import decode, forward
from zoo.layers import RWKV4, Dropout, LayerNorm, TokenInfo
from zoo.layers.token_info import pack_positions
from zoo.models import Hidden
from zoo.models.hf.families.rwkv_layers import RWKVChannelMixing, TwoMixerBlock

EMBED, SEQ = 16, 7


def make_channel_mixing():
    return randomize(partial(RWKVChannelMixing, EMBED, mlp=24), power=-0.25)


def naive_channel_mixing(layer, x):
    previous = jnp.pad(x, [(0, 0), (1, 0), (0, 0)])[:, :-1]
    lerp = lambda mix: mix * x + (1 - mix) * previous
    value = layer.value(jax.nn.relu(layer.key(lerp(layer.key_mix))) ** 2)
    return jax.nn.sigmoid(layer.receptance(lerp(layer.receptance_mix))) * value


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
    packed = forward(layer, x, TokenInfo(pack_positions(segments), segments))
    for document in (slice(0, 4), slice(4, 7)):
        assert relative_error(packed[:, document], forward(layer, x[:, document])) < 1e-5


def test_channel_mixing_is_causal_and_sees_one_previous_token():
    layer, x = make_channel_mixing(), activations(1, SEQ, EMBED)
    jacobian = jax.jit(jax.jacobian(lambda x: layer(x, TokenInfo())[0][0].sum(-1)))(x)[:, 0]
    has_gradient = jnp.abs(jacobian).max(-1) > 0
    expected = jnp.tril(jnp.ones((SEQ, SEQ), bool)) & ~jnp.tril(jnp.ones((SEQ, SEQ), bool), -2)
    assert (has_gradient == expected).all()


@pytest.mark.ci
def test_two_mixer_block_of_a_smaller_stream_is_as_much_smaller():
    """Norms without an epsilon undo powers of 2, to the bit."""
    mixer_key, ffn_key, data_key = jax.random.split(jax.random.key(0), 3)
    norm = partial(LayerNorm, 8, epsilon=0.0)
    parts = {"mixer": RWKV4(8, key=mixer_key), "ffn": RWKVChannelMixing(8, 16, key=ffn_key)}
    parts |= {"mixer_norm": norm(), "ffn_norm": norm(), "dropout": Dropout(0.0)}
    x = jax.random.normal(data_key, (2, 5, 8))
    plain, _ = TwoMixerBlock(**parts)(Hidden(x), TokenInfo())
    rescaled, _ = TwoMixerBlock(residual_multiplier=0.25, shrink=0.5, **parts)(Hidden(0.25 * x), TokenInfo())
    np.testing.assert_array_equal(rescaled.x, 0.125 * plain.x)
    assert jnp.abs(plain.x).max() > 0.1
