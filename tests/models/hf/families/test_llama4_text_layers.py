"""Chunked attention equals its formula, in packed rows, through a cache and on meshes; a mixture that weighs the inputs
of experts equals a loop over experts, also sharded."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import GatedMLP, RMSNorm, TokenInfo
from zoo.layers.query_scale import QueryScale
from zoo.models.hf.families.llama4_text_layers import ChunkedAttention, InputWeightedMixture, TopSigmoidRouter
from zoo.ops.rotary import Rotary, apply_rotary
from zoo.parallel import Dim, gather

EMBED, HEADS, CHUNK, SEQ = 16, 4, 4, 11
WIDTH, EXPERTS, TOP = 8, 4, 2
ROTARY, SCALE = Rotary(4, interleaved=True), QueryScale(0.5, 3, offset=1)


def make(**options):
    norm = lambda: RMSNorm(4, features=Dim("head_dim"), epsilon=1e-3)
    options = {"kv_heads": 2, "rotary": ROTARY, "qk_norm": norm, "query_scale": SCALE, "chunk": CHUNK} | options
    return randomize(lambda key: ChunkedAttention(EMBED, HEADS, **options, key=key))


def make_info():
    """A row of two documents, the first of 5 tokens, and a row of one, at positions that do not start at 0."""
    places = np.arange(SEQ)
    positions = np.stack([np.where(places < 5, places, places - 5), places + 2])
    return TokenInfo(jnp.asarray(positions), jnp.asarray(np.stack([1 + (places >= 5), np.ones(SEQ, int)])))


def compute_formula(layer, x, info):
    """Attention with the whole mask."""
    (cos, sin), inner = ROTARY(info.positions), layer.attention
    query, key, value = (
        (x @ linear.weight.T).reshape(*x.shape[:2], -1, 4) for linear in (inner.query, inner.key, inner.value)
    )
    query = inner.query_norm(apply_rotary(query, cos, sin, interleaved=True))
    key = inner.key_norm(apply_rotary(key, cos, sin, interleaved=True))
    query = query * (1 + 0.5 * jnp.log1p((info.positions + 1) // 3))[..., None, None]
    key, value = jnp.repeat(key, 2, axis=2), jnp.repeat(value, 2, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 2
    same = lambda ids: ids[:, :, None] == ids[:, None, :]
    mask = same(info.segment_ids) & same(info.positions // CHUNK) & jnp.tril(jnp.ones((SEQ, SEQ), bool))
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(*x.shape[:2], -1) @ inner.out.weight.T


@eqx.filter_jit
def run_all(layer, x, info):
    """Return the outputs of the layer, of its formula, and of the second row through a cache, in pieces."""
    row, positions = x[1:], info.positions[1:]
    state, outputs = layer.init_state(1, 20), []
    assert state.positions.shape == (1, CHUNK)
    for start, stop in ((0, 3), (3, 4), (4, 10), (10, 11)):
        output, state = layer(row[:, start:stop], TokenInfo(positions[:, start:stop]), state)
        outputs.append(output)
    return layer(x, info)[0], compute_formula(layer, x, info), jnp.concatenate(outputs, 1)


def test_chunked_attention_equals_formula_packed_and_cached():
    ours, expected, cached = run_all(make(), activations(2, SEQ, EMBED), make_info())
    assert relative_error(ours, expected) < 1e-5
    assert relative_error(cached, expected[1:]) < 1e-5, "a ring buffer of one chunk"


@pytest.mark.slow
def test_chunked_attention_on_meshes_equals_one_device():
    """Heads over `tensor`, and rows of several chunks over `context`."""
    layer, x = make(), activations(2, 16, EMBED)
    expected = layer(x, TokenInfo())[0]
    assert relative_error(make(chunk=None)(x, TokenInfo())[0], expected) > 1e-2, "16 tokens are several chunks"
    for form in ("ring", "gathered"):
        mesh = zoo.make_mesh(1, tensor=2, context=2, devices=jax.devices()[:4], layout=zoo.Layout(context=form))
        run = zoo.spmd(lambda layer, x: gather(layer)(x, TokenInfo())[0], mesh, out="batch seq embed")
        assert relative_error(run(zoo.place(layer, mesh), x), expected) < 1e-5, form


def test_chunks_and_query_scales_are_not_empty():
    with pytest.raises(ValueError, match="a chunk holds at least 1 token, not 0"):
        make(chunk=0)
    with pytest.raises(ValueError, match="steps of at least 1 token, not of 0"):
        QueryScale(0.1, 0)


def make_mixture(key):
    expert = partial(GatedMLP, WIDTH, 6)
    return InputWeightedMixture(partial(TopSigmoidRouter, WIDTH, EXPERTS, TOP), expert, EXPERTS, shared=expert, key=key)


def compute_mixture(layer, x):
    """S(x) + the sum over experts of E(w x), where w is 0 for experts that were not chosen."""
    logits = x @ layer.router.scores.weight.T
    threshold = jnp.sort(logits, axis=-1)[..., -TOP, None]
    weights = jnp.where(logits >= threshold, jax.nn.sigmoid(logits), 0)
    y = layer.shared(x)[0]
    for number in range(EXPERTS):
        expert = jax.tree.map(lambda array, number=number: array[number], eqx.filter(layer.experts, eqx.is_array))
        expert = eqx.combine(expert, eqx.filter(layer.experts, eqx.is_array, inverse=True))
        y = y + expert(x * weights[..., number, None])[0]
    return y


@pytest.mark.slow
def test_input_weighted_mixture_equals_loop_on_meshes():
    layer, x = randomize(make_mixture), activations(4, 5, WIDTH)
    run = lambda layer, x: layer(x)[0]
    ours, expected = eqx.filter_jit(lambda layer, x: (run(layer, x), compute_mixture(layer, x)))(layer, x)
    assert relative_error(ours, expected) < 1e-5
    mesh = zoo.make_mesh(1, expert=2, tensor=2, devices=jax.devices()[:4])
    sharded = zoo.spmd(run, mesh, out="batch seq embed")(zoo.place(layer, mesh), x)
    assert relative_error(sharded, expected) < 1e-5
