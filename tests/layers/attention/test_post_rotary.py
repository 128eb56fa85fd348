"""Attention with a QK norm after RoPE and scaled queries equals its formula, a cache in pieces, and a mesh."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import PostRotaryAttention, RMSNorm, TokenInfo
from zoo.layers.query_scale import QueryScale
from zoo.ops.rotary import Rotary, apply_rotary
from zoo.parallel import Dim, gather

ROTARY, WINDOW, SEQ = Rotary(4), 5, 8


def make():
    norm = lambda: RMSNorm(4, features=Dim("head_dim"), epsilon=1e-3)
    options = {"kv_heads": 2, "rotary": ROTARY, "qk_norm": norm, "query_scale": QueryScale(0.5, 3), "window": WINDOW}
    return randomize(lambda key: PostRotaryAttention(16, 4, **options, bias=True, key=key))


def compute_formula(layer, x):
    """Attention with the whole mask."""
    cos, sin = ROTARY(jnp.arange(SEQ))
    split = lambda linear: (x @ linear.weight.T + linear.bias).reshape(*x.shape[:2], -1, 4)
    query, key = (apply_rotary(split(linear), cos, sin) for linear in (layer.query, layer.key))
    normalize = lambda x, norm: norm.weight * x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)
    query, key = normalize(query, layer.query_norm), normalize(key, layer.key_norm)
    query = query * (1 + 0.5 * jnp.log1p(jnp.arange(SEQ) // 3))[:, None, None]
    key, value = jnp.repeat(key, 2, axis=2), jnp.repeat(split(layer.value), 2, axis=2)
    age = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)
    scores = jnp.where((age >= 0) & (age < WINDOW), jnp.einsum("bqhd,bkhd->bhqk", query, key) / 2, -jnp.inf)
    heads = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), value)
    return heads.reshape(*x.shape[:2], -1) @ layer.out.weight.T


@eqx.filter_jit
def run_all(layer, x):
    state, outputs, positions = layer.init_state(2, SEQ), [], jnp.broadcast_to(jnp.arange(SEQ), (2, SEQ))
    for start, stop in ((0, 4), (4, 5), (5, 8)):
        output, state = layer(x[:, start:stop], TokenInfo(positions[:, start:stop]), state)
        outputs.append(output)
    return layer(x, TokenInfo())[0], compute_formula(layer, x), jnp.concatenate(outputs, 1)


def test_post_rotary_attention_equals_formula_cache_and_mesh():
    layer, x = make(), activations(2, SEQ, 16)
    ours, expected, cached = run_all(layer, x)
    assert relative_error(ours, expected) < 1e-5
    assert relative_error(cached, expected) < 1e-5
    mesh = zoo.make_mesh(1, tensor=2, context=2, devices=jax.devices()[:4])
    run = zoo.spmd(lambda layer, x: gather(layer)(x, TokenInfo())[0], mesh, out="batch seq embed")
    assert relative_error(run(zoo.place(layer, mesh), x), expected) < 1e-5
    with pytest.raises(ValueError, match="4 heads do not divide evenly over 3 kv_heads"):
        PostRotaryAttention(16, 4, rotary=ROTARY, kv_heads=3, key=jax.random.key(0))
