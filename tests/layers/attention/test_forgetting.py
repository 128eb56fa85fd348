"""Forgetting attention equals its formula, a cache in pieces, packed rows and meshes, and keeps digits in bfloat16."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import ForgettingAttention, RMSNorm, TokenInfo
from zoo.layers.kv_cache import forget
from zoo.ops.rotary import Rotary, apply_rotary
from zoo.tools.testing import check_mixer

ROTARY, SEQ = Rotary(4), 9
norm = partial(RMSNorm, epsilon=1e-5)
PRO = {"norm": norm, "gate": True, "qk_norm": partial(norm, 4)}
CHECKED = partial(ForgettingAttention, 16, 4, kv_heads=2, window=4, rotary=ROTARY, **PRO)


def compute_formula(layer, x):
    """Four heads with the log gates of each pair summed one by one, in float32."""
    project = lambda linear: (x @ linear.weight.T).reshape(*x.shape[:2], -1, 4)
    normalize = lambda x, weight: weight * x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    cos, sin = ROTARY(jnp.arange(SEQ))
    query = apply_rotary(normalize(project(layer.query), layer.query_norm.weight), cos, sin)
    key = apply_rotary(normalize(project(layer.key), layer.key_norm.weight), cos, sin)
    key, value = (jnp.repeat(y, 2, axis=2) for y in (key, project(layer.value)))
    log_gates = jnp.repeat(jax.nn.log_sigmoid(x @ layer.forget.weight.T + layer.forget.bias), 2, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 2
    for later in range(SEQ):
        for earlier in range(later):
            scores = scores.at[:, :, later, earlier].add(log_gates[:, earlier + 1 : later + 1].sum(1))
    scores = jnp.where(jnp.tri(SEQ, dtype=bool), scores, -jnp.inf)
    heads = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), value)
    heads = normalize(heads, layer.norm.weight).reshape(*x.shape[:2], -1)
    return (jax.nn.sigmoid(x @ layer.gate.weight.T) * heads) @ layer.out.weight.T


@eqx.filter_jit
def run_in_pieces(layer, x):
    """Return the output through a cache, in pieces, after other tokens that are forgotten."""
    state = layer.init_state(*x.shape[:2])
    positions = jnp.broadcast_to(jnp.arange(SEQ), x.shape[:2])
    outputs = []
    for start, stop in ((0, 4), (4, 5), (5, SEQ)):
        info = TokenInfo(positions[:, start:stop])
        state = forget(layer(-x[:, start:stop], info, state)[1], jnp.full(x.shape[0], start))
        output, state = layer(x[:, start:stop], info, state)
        outputs.append(output)
    return jnp.concatenate(outputs, axis=1)


def test_padding_of_a_turn_forgets_nothing():
    """A second turn that is padded on the left gives what the text at once does."""
    layer, x = randomize(lambda key: ForgettingAttention(16, 4, rotary=ROTARY, key=key)), activations(2, 7, 16)

    @eqx.filter_jit
    def run(layer, x):
        _, state = layer(x[:, :3], TokenInfo(jnp.broadcast_to(jnp.arange(3), (2, 3))), layer.init_state(2, 8))
        padded = jnp.concatenate([7 * x[:, :2], x[:, 3:]], axis=1)
        positions = jnp.broadcast_to(jnp.array([-1, -1, 3, 4, 5, 6]), (2, 6))
        return layer(x, TokenInfo())[0], layer(padded, TokenInfo(positions), state)[0]

    at_once, turn = run(layer, x)
    assert relative_error(turn[:, 2:], at_once[:, 3:]) < 1e-5


@pytest.mark.ci
def test_forgetting_attention_equals_its_formula():
    layer = randomize(lambda key: ForgettingAttention(16, 4, kv_heads=2, rotary=ROTARY, **PRO, key=key))
    x = activations(2, SEQ, 16)
    expected = eqx.filter_jit(compute_formula)(layer, x)
    assert relative_error(eqx.filter_jit(layer)(x, TokenInfo())[0], expected) < 1e-5
    assert relative_error(run_in_pieces(layer, x), expected) < 1e-5


def test_a_bfloat16_cache_keeps_the_sums_of_log_gates():
    """Sums of -4,000, where bfloat16 has steps of 16: a text after tokens that are forgotten equals the text alone."""
    layer = randomize(lambda key: ForgettingAttention(16, 4, key=key))
    gates = lambda layer: (layer.forget.weight, layer.forget.bias)
    layer = eqx.tree_at(gates, layer, (jnp.zeros((4, 16)), -jnp.ones(4)))
    closed = eqx.tree_at(gates, layer, (jnp.zeros((4, 16)), jnp.full(4, -2000.0)))
    x = activations(2, 24, 16)
    positions = jnp.broadcast_to(jnp.arange(24), (2, 24))

    @eqx.filter_jit
    def continue_text(dtype):
        """Two tokens with closed gates, the second of which begins the text."""
        state = layer.init_state(2, 24, dtype)
        outputs = []
        for mixer, start, stop in ((closed, 0, 2), (layer, 2, 20), (layer, 20, 24)):
            output, state = mixer(x[:, start:stop], TokenInfo(positions[:, start:stop]), state)
            outputs.append(output)
        return jnp.concatenate(outputs[1:], axis=1)

    expected = eqx.filter_jit(layer)(x[:, 1:], TokenInfo())[0][:, 1:]
    assert relative_error(continue_text(jnp.float32), expected) < 1e-5
    assert relative_error(continue_text(jnp.bfloat16), expected) < 2e-2


def test_forgetting_attention_keeps_its_promises():
    check_mixer(CHECKED, meshes=[zoo.make_mesh(data=2, context=2, tensor=2)])


@pytest.mark.slow
def test_more_meshes_equal_one_device():
    """With one KV head, whose gates are replicated over `tensor`, too."""
    check_mixer(CHECKED, meshes=[zoo.make_mesh(data=2, fsdp=2, tensor=2), zoo.make_mesh(1, context=4, tensor=2)])
    one = partial(ForgettingAttention, 16, 4, kv_heads=1)
    check_mixer(one, meshes=[zoo.make_mesh(data=2, context=2, tensor=2), zoo.make_mesh(data=2, tensor=4)])


def test_float16_caches_are_refused():
    with pytest.raises(ValueError, match="range of bfloat16, which float16 does not have"):
        ForgettingAttention(16, 4, key=jax.random.key(0)).init_state(1, 8, jnp.float16)
