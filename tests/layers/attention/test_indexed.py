"""Attention to indexed blocks: the choice against its definition, dense where few blocks are, caches, meshes."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo import Layout
from zoo.generate.branches import find_recurrent_state
from zoo.layers import Attention, IndexedAttention, MeanKeyIndexer, TokenInfo
from zoo.ops.attention.block_selection import place_in_blocks
from zoo.ops.rotary import Rotary
from zoo.ops.sectioned_rotary import SectionedRotary
from zoo.tools.testing import check_mixer

SEQ = 10
INDEXER = partial(MeanKeyIndexer, 16, 4, head_dim=6, block=2, top=2)
CHECKED = partial(IndexedAttention, 16, 4, kv_heads=2, rotary=Rotary(4), indexer=INDEXER)


@pytest.mark.ci
def test_indexed_attention_keeps_its_promises():
    layout = Layout(context="gathered")
    check_mixer(CHECKED, meshes=[zoo.make_mesh(data=2, context=2, tensor=2, layout=layout)])


@pytest.mark.slow
def test_more_meshes_equal_one_device():
    """With more devices along tensor than key heads, and shards of the sequence that cut a block."""
    gathered = partial(zoo.make_mesh, layout=Layout(context="gathered"))
    check_mixer(CHECKED, meshes=[gathered(data=1, fsdp=2, tensor=4), gathered(data=2, context=4)])


def choose_blocks(indexer, rotary, x):
    """Return the blocks that each query of a text attends to, by the definition of the scores."""
    turn = lambda vector, position: rotate_pairs(vector, rotary, position)
    queries = (x @ np.asarray(indexer.query.weight).T).reshape(len(x), -1, indexer.head_dim)
    keys = x @ np.asarray(indexer.key.weight).T
    chosen = []
    for t in range(len(x)):
        whole = (t + 1) // indexer.block
        scores = []
        for b in range(whole):
            key = normalize(keys[b * indexer.block : (b + 1) * indexer.block].mean(0))
            key = turn(key, b * indexer.block)
            scores.append(sum(max(0.0, turn(normalize(query), t) @ key) for query in queries[t]))
        best = set(sorted(range(whole), key=lambda b: (-scores[b], b))[: indexer.top])
        if (t + 1) % indexer.block:
            best.add(t // indexer.block)
        chosen.append(best)
    return chosen


def normalize(x):
    return x / np.sqrt((x * x).mean() + 1e-6)


def rotate_pairs(x, rotary, position):
    half = rotary.dim // 2
    angles = position * rotary.base ** (-np.arange(half) / half)
    first, second = x[:half].copy(), x[half : 2 * half].copy()
    x = x.copy()
    x[:half] = first * np.cos(angles) - second * np.sin(angles)
    x[half : 2 * half] = second * np.cos(angles) + first * np.sin(angles)
    return x


def test_queries_see_the_blocks_of_the_definition():
    """Each output changes with the tokens of the chosen blocks, and with no other."""
    layer = randomize(lambda key: CHECKED(key=key))
    layer = eqx.tree_at(lambda x: (x.indexer.query_norm, x.indexer.key_norm), layer, make_norms())
    x = activations(1, SEQ, 16)
    chosen = choose_blocks(layer.indexer, layer.attention.rotary, np.asarray(x[0], np.float64))
    assert {len(blocks) for blocks in chosen} >= {1, 2, 3} and any(t // 2 not in chosen[t] for t in range(SEQ))

    values = jax.jit(lambda x, scale: run_with_scaled_value(layer, x, scale))
    plain = values(x, jnp.ones(SEQ))
    for token in range(SEQ):
        changed = np.abs(values(x, jnp.ones(SEQ).at[token].set(2.0)) - plain).max(-1)[0] > 1e-6
        expected = [token <= t and token // 2 in chosen[t] for t in range(SEQ)]
        np.testing.assert_array_equal(changed, expected)


def make_norms():
    """Return the norms of a new indexer: weights of 1."""
    fresh = INDEXER(key=jax.random.key(0))
    return fresh.query_norm, fresh.key_norm


def run_with_scaled_value(layer, x, scale):
    info = TokenInfo()
    query, key, value = layer.attention.project(x, info, None)
    cos_sin = layer.attention.rotary(jnp.arange(SEQ)[None])
    index_query = layer.indexer.project_query(x, layer.attention.rotary, cos_sin)
    value = value * scale[:, None, None]
    mixed = layer.attend_to_sequence(query, key, value, index_query, layer.indexer.project_key(x), info)
    return mixed.reshape(*mixed.shape[:2], -1)


def test_few_blocks_are_attended_to_densely():
    layer = randomize(lambda key: CHECKED(key=key))
    x = activations(2, SEQ, 16)
    run = eqx.filter_jit(lambda layer, x: layer(x, TokenInfo())[0])
    assert relative_error(run(layer, x[:, :4]), run(layer.attention, x[:, :4])) < 1e-6
    assert relative_error(run(layer, x), run(layer.attention, x)) > 1e-2


def test_packed_texts_equal_texts_alone():
    """Blocks begin anew in each text, and its keys are turned by the positions in it."""
    layer = randomize(lambda key: CHECKED(key=key))
    x = activations(1, 2 * SEQ + 1, 16)
    lengths = (SEQ + 1, SEQ)
    ids = jnp.repeat(jnp.array([1, 2]), jnp.array(lengths))[None]
    positions = jnp.concatenate([jnp.arange(length) for length in lengths])[None]
    packed, _ = layer(x, TokenInfo(positions=positions, segment_ids=ids))
    alone = [layer(part, TokenInfo())[0] for part in (x[:, : SEQ + 1], x[:, SEQ + 1 :])]
    assert relative_error(packed, jnp.concatenate(alone, axis=1)) < 1e-5


@pytest.mark.parametrize("pieces", [(SEQ,), (4, 1, 1, 3, 1)], ids=str)
def test_a_cache_selects_the_blocks_of_the_sequence(pieces):
    layer = randomize(lambda key: CHECKED(key=key))
    x = 3 * activations(2, SEQ, 16)
    state = layer.init_state(2, SEQ + 3)
    outputs = []
    for start, count in zip(np.cumsum((0, *pieces)), pieces, strict=False):
        positions = jnp.broadcast_to(jnp.arange(start, start + count), (2, count))
        y, state = layer(x[:, start : start + count], TokenInfo(positions=positions), state)
        outputs.append(y)
    assert relative_error(jnp.concatenate(outputs, axis=1), layer(x, TokenInfo())[0]) < 1e-5


def test_of_equal_scores_the_first_blocks_are_selected():
    indexer = INDEXER(key=jax.random.key(0))
    places = place_in_blocks(jnp.arange(8)[None], 2)
    chosen = indexer.select(jnp.zeros((1, 8, 4)), places)
    assert [np.flatnonzero(row).tolist() for row in chosen[0]] == [
        [0], [0], [0, 1], [0, 1], [0, 1, 2], [0, 1], [0, 1, 3], [0, 1],
    ]  # fmt: skip


@pytest.mark.ci
def test_generation_with_rejected_proposals_equals_generation():
    """A proposal that is rejected leaves no trace in the keys of blocks; prompts are padded to three lengths."""
    assert find_recurrent_state(CHECKED(key=jax.random.key(0)).init_state(1, 8)) is None, "it is forgotten, not copied"
    indexer = partial(MeanKeyIndexer, 16, 4, head_dim=6, block=3, top=2)
    mixer = partial(IndexedAttention, kv_heads=1, rotary=Rotary(4), indexer=indexer)
    make = partial(zoo.models.Transformer, vocab=64, embed=16, heads=2, mlp=16, key=jax.random.key(0))
    model = jax.tree.map(lambda x: 3 * x, make(layers=2, mixer=mixer))
    draft = jax.tree.map(lambda x: 3 * x, make(layers=1))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (3, 9)))
    mask = jnp.arange(9) >= jnp.array([[0], [3], [8]])
    plain = zoo.generate(model, tokens, mask=mask, max_new_tokens=12)
    found = zoo.generate(model, tokens, mask=mask, max_new_tokens=12, draft=draft, draft_tokens=3, details=True)
    np.testing.assert_array_equal(found.tokens, plain)
    assert found.steps > 3, "some proposals are rejected"
    assert jnp.argmax(model(tokens[:1])[0, -1]) == plain[0, 0]


def test_indexed_attention_refuses_what_it_cannot_compute():
    mesh = zoo.make_mesh(context=2, devices=jax.devices()[:2])
    layer, x = CHECKED(key=jax.random.key(0)), activations(2, SEQ, 16)
    run = zoo.spmd(lambda layer, x: layer(x, TokenInfo())[0], mesh, out="batch seq embed")
    with pytest.raises(ValueError, match="'ring' cannot compute this, because tokens select keys .* gathered"):
        run(zoo.place(layer, mesh), x)
    for options, message in (
        ({"indexer": partial(INDEXER, block=0)}, "block is 0"),
        ({"indexer": partial(INDEXER, top=0)}, "top is 0"),
        ({"window": 3}, "window=3: a query attends to blocks"),
        ({"block": 2}, "has blocks of its own"),
        ({"rotary": SectionedRotary(4, sections=(1, 1))}, "RoPE by rows and columns"),
        ({"indexer": partial(INDEXER, head_dim=2)}, "RoPE turns 4 features, and the indexer has 2"),
    ):
        with pytest.raises(ValueError, match=message):
            CHECKED(**options, attention=Attention, key=jax.random.key(0))


def test_the_indexer_has_no_gradient():
    layer = randomize(lambda key: CHECKED(key=key))
    gradient = eqx.filter_grad(lambda layer: layer(activations(1, SEQ, 16), TokenInfo())[0].sum())(layer)
    assert all(not jnp.any(x) for x in jax.tree.leaves(gradient.indexer))
    assert all(jnp.any(x) for x in jax.tree.leaves(gradient.attention))
