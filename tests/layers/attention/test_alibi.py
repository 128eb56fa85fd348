"""Attention with linear biases equals its formula, in packed rows, a cache in pieces, bfloat16 and on a mesh."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import AlibiAttention, TokenInfo
from zoo.layers.attention.alibi import compute_alibi_slopes
from zoo.parallel import gather

HEADS, SEQ, START = 6, 8, 1001
"""A number of heads that is no power of two, and positions that bfloat16 does not have."""


def make(**options):
    return randomize(lambda key: AlibiAttention(24, HEADS, bias=True, key=key, **options))


def make_info():
    """A row of two documents, and a row that starts late in one."""
    places = np.arange(SEQ)
    positions = np.stack([np.where(places < 5, places, places - 5), places + START])
    return TokenInfo(jnp.asarray(positions), jnp.asarray(np.stack([1 + (places >= 5), np.ones(SEQ, int)])))


def compute_formula(layer, x, info, rounded=False):
    """Attention with the whole matrix of biases, in float32."""
    split = lambda linear: (x @ linear.weight.T + linear.bias).reshape(*x.shape[:2], HEADS, 4)
    query, key, value = split(layer.query), split(layer.key), split(layer.value)
    slopes = jnp.array(compute_alibi_slopes(HEADS))
    if rounded:
        bias = slopes.astype(jnp.bfloat16)[:, None] * info.positions[:, None].astype(jnp.bfloat16)
        bias = bias.astype(jnp.float32)[:, :, None] / 2
    else:
        bias = -slopes[:, None, None] * (info.positions[:, :, None] - info.positions[:, None])[:, None]
    same = info.segment_ids[:, :, None] == info.segment_ids[:, None]
    mask = (same & jnp.tril(jnp.ones((SEQ, SEQ), bool)))[:, None]
    scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", query, key) / 2 + bias, -jnp.inf)
    heads = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), value)
    return heads.reshape(*x.shape[:2], -1) @ layer.out.weight.T


@eqx.filter_jit
def run_all(layer, rounded, x, info):
    """Return outputs and formulas, with and without rounding; the second row from a cache; the rows in bfloat16."""
    state, outputs = layer.init_state(1, SEQ), []
    for start, stop in ((0, 4), (4, 5), (5, SEQ)):
        piece = TokenInfo(info.positions[1:, start:stop])
        output, state = layer(x[1:, start:stop], piece, state)
        outputs.append(output)
    half = zoo.cast(layer, jnp.bfloat16)(x.astype(jnp.bfloat16), info)[0]
    exact, coarse = compute_formula(layer, x, info), compute_formula(rounded, x, info, rounded=True)
    return layer(x, info)[0], exact, jnp.concatenate(outputs, 1), half, rounded(x, info)[0], coarse


@pytest.mark.ci
def test_alibi_attention_equals_formula_cache_and_mesh():
    layer, x, info = make(), activations(2, SEQ, 24), make_info()
    ours, expected, cached, half, rounded, coarse = run_all(layer, make(rounded=True), x, info)
    assert relative_error(ours, expected) < 1e-4
    assert relative_error(cached, expected[1:]) < 1e-4
    assert relative_error(half.astype(jnp.float32), expected) < 2e-2, "far positions keep their distances in bfloat16"
    assert relative_error(rounded, coarse) < 1e-4 and relative_error(coarse, expected) > 2e-2
    mesh = zoo.make_mesh(1, tensor=2, context=2, devices=jax.devices()[:4])
    run = zoo.spmd(lambda layer, x, info: gather(layer)(x, info)[0], mesh, out="batch seq embed")
    assert relative_error(run(zoo.place(layer, mesh), x, info), expected) < 1e-4


def test_alibi_slopes_are_those_of_the_paper():
    assert compute_alibi_slopes(8) == tuple(2.0**-h for h in range(1, 9))
    assert compute_alibi_slopes(1) == (2.0**-8,)
    assert compute_alibi_slopes(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)
    with pytest.raises(ValueError, match="a clip bounds values to more than 0, not to 0"):
        make(clip=0)
