"""Compressed attention: the definition in numpy, caches, packed rows, meshes, selections, and invalid sizes."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo import Layout
from zoo.layers import BlockIndexer, CompressedAttention, TokenInfo
from zoo.layers.kv_cache import add_slots, forget
from zoo.ops.rotary import DynamicScaling, Rotary
from zoo.tools.testing import check_mixer

EMBED, HEADS, HEAD_DIM, LATENT, EPSILON = 16, 4, 6, 10, 1e-6
SIZES = {"head_dim": HEAD_DIM, "query_latent": LATENT, "window": 3, "out_groups": 2, "out_latent": 5}
LAYER = partial(CompressedAttention, EMBED, HEADS, rotary=Rotary(4, interleaved=True), **SIZES)
INDEXER = partial(BlockIndexer, EMBED, 2, query_latent=LATENT, head_dim=8, block=2, top=2)
HEAVY = partial(LAYER, block=3)
SPARSE = partial(LAYER, block=2, overlap=True, indexer=INDEXER)
KINDS = {"window": LAYER, "heavy": HEAVY, "sparse": SPARSE}


def gathered(**axes):
    return zoo.make_mesh(**axes, layout=Layout(context="gathered"))


@eqx.filter_jit
def forward(layer, x, info=None):
    return layer(x, info or TokenInfo())[0]


def normalize(x, weight=None):
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON)
    return x if weight is None else x * np.asarray(weight)


def turn(x, position, rotary, sign=1):
    """Rotate neighbors of the last features of a vector."""
    cos, sin = (np.asarray(angle)[0] for angle in rotary(jnp.asarray([position])))
    rest, turned = np.split(x, [len(x) - rotary.dim])
    a, b = turned[0::2], turned[1::2]
    return np.concatenate([rest, np.stack([a * cos - sign * b * sin, b * cos + sign * a * sin], -1).reshape(-1)])


def compress_naively(compressor, x, position_of, rotary):
    """Return the key of each whole block: one feature, token and block at a time."""
    values, gates = (x @ np.asarray(linear.weight).T for linear in (compressor.value, compressor.gate))
    places, size = np.asarray(compressor.places), compressor.block
    dim = values.shape[1] // (1 + compressor.overlap)
    keys = []
    for block in range(len(x) // size):
        tokens = range(block * size, (block + 1) * size)
        terms = [(values[t, -dim:], gates[t, -dim:] + places[t % size, -dim:]) for t in tokens]
        if compressor.overlap and block:
            before = range((block - 1) * size, block * size)
            terms += [(values[t, :dim], gates[t, :dim] + places[t % size, :dim]) for t in before]
        weights = np.exp([gate for _, gate in terms])
        key = (weights * [value for value, _ in terms]).sum(0) / weights.sum(0)
        keys.append(turn(normalize(key, compressor.norm.weight), position_of[block * size], rotary))
    return keys


def attend_naively(layer, x):
    """Compute the docstring's formulas for one row, one query and head at a time; return the outputs, and the
    divergences of the indexer."""
    x = np.float64(x)
    matrix = lambda linear: np.asarray(linear.weight, np.float64)
    rotary = layer.rotary
    latent = normalize(x @ matrix(layer.query_down).T, layer.query_norm.weight)
    queries = normalize((latent @ matrix(layer.query_up).T).reshape(len(x), HEADS, HEAD_DIM))
    keys = normalize(x @ matrix(layer.key).T, layer.key_norm.weight)
    keys = [turn(key, t, rotary) for t, key in enumerate(keys)]
    blocks, index_blocks, size = [], [], 1
    if layer.compressor is not None:
        size = layer.compressor.block
        blocks = compress_naively(layer.compressor, x, range(len(x)), rotary)
    if layer.indexer is not None:
        index_blocks = compress_naively(layer.indexer.compressor, x, range(len(x)), rotary)
    outputs = []
    divergences = []
    for t in range(len(x)):
        seen = list(range((t + 1) // size)) if blocks else []
        if layer.indexer is not None:
            index_queries = (matrix(layer.indexer.query_up) @ latent[t]).reshape(-1, layer.indexer.head_dim)
            weights = matrix(layer.indexer.head_weights) @ x[t]
            products = [[max(turn(q, t, rotary) @ index_blocks[s], 0) for q in index_queries] for s in seen]
            index_scores = [weights @ product / (len(weights) * layer.indexer.head_dim) ** 0.5 for product in products]
            if not layer.dense:
                seen = sorted(seen, key=lambda s: -index_scores[s])[: layer.indexer.top]
        visible = np.array(keys[max(t - layer.window + 1, 0) : t + 1] + [blocks[s] for s in seen])
        heads = []
        attention = 0
        for head, sink in zip(queries[t], np.asarray(layer.sinks), strict=True):
            scores = np.exp(visible @ turn(head, t, rotary) * HEAD_DIM**-0.5)
            probabilities = scores / (scores.sum() + np.exp(sink))
            heads.append(turn(probabilities @ visible, t, rotary, sign=-1))
            attention = attention + probabilities[len(visible) - len(seen) :]
        groups = np.concatenate(heads).reshape(2, -1)
        down = matrix(layer.out_down).reshape(2, 5, -1)
        outputs.append(matrix(layer.out) @ np.concatenate([w @ g for w, g in zip(down, groups, strict=True)]))
        if layer.indexer is not None:
            target = attention / attention.sum() if seen else np.zeros(0)
            chosen = np.exp([index_scores[s] for s in seen])
            divergences.append((target * np.log(target / (chosen / chosen.sum()))).sum())
    return np.stack(outputs), divergences


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_equals_the_definition(kind):
    layer, x = randomize(KINDS[kind]), activations(2, 11, EMBED)
    y = forward(layer, x)
    for row in range(2):
        assert relative_error(y[row], attend_naively(layer, np.asarray(x[row]))[0]) < 2e-5


@pytest.mark.parametrize("dense", [False, True])
def test_the_divergence_of_the_indexer_equals_its_definition(dense):
    layer, x = randomize(partial(SPARSE, dense=dense)), activations(2, 11, EMBED)
    run = eqx.filter_jit(lambda layer, x: zoo.capture(layer, "indexer_divergence")(x, TokenInfo()))
    (y, _), seen = run(layer, x)
    for row in range(2):
        wanted, divergences = attend_naively(layer, np.asarray(x[row]))
        assert relative_error(y[row], wanted) < 2e-5
        np.testing.assert_allclose(seen["indexer_divergence"][row], divergences, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_attention_keeps_its_promises(kind):
    check_mixer(KINDS[kind], meshes=[gathered(data=2, context=2, tensor=2)], seq_len=8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_meshes_equal_one_device(kind):
    """Two shards of a sequence that cut blocks, and heads over all devices that the groups of the output allow."""
    layer, x = randomize(KINDS[kind]), activations(4, 16, EMBED)
    run = lambda layer, batch: ((layer(batch["x"], TokenInfo())[0] ** 2).sum(), jnp.float32(batch["x"].size))
    results = []
    for mesh in (zoo.make_mesh(devices=jax.devices()[:1]), gathered(data=1, fsdp=2, tensor=2, context=2)):
        step = zoo.value_and_grad(lambda layer, batch: run(zoo.parallel.gather(layer), batch), mesh)
        results.append(jax.device_get(step(zoo.place(layer, mesh), {"x": x})))
    for ours, wanted in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.abs(ours - wanted).max() <= 3e-5 * max(np.abs(wanted).max(), 1e-6)


def test_a_sharded_sequence_needs_gathered_keys():
    layer = eqx.filter_eval_shape(HEAVY, key=jax.random.key(0))
    mesh = zoo.make_mesh(data=1, context=2, devices=jax.devices()[:2])
    run = zoo.spmd(lambda layer, x: layer(x, TokenInfo())[0], mesh, out="batch seq embed")
    with pytest.raises(ValueError, match="gathered"):
        eqx.filter_eval_shape(run, layer, jax.ShapeDtypeStruct((1, 8, EMBED), jnp.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_forgotten_tokens_leave_no_trace(kind):
    """As in speculative decoding: tokens that end blocks are read, forgotten and replaced by others."""
    layer, x = randomize(KINDS[kind]), activations(2, 12, EMBED)
    wrong = activations(2, 12, EMBED, seed=7)

    @eqx.filter_jit
    def extend(x, start, state):
        return layer(x, TokenInfo(jnp.broadcast_to(start + jnp.arange(x.shape[1]), x.shape[:2])), state)

    state = add_slots(layer.init_state(2, 12), 4)
    y, state = extend(x[:, :5], 0, state)
    _, state = extend(wrong[:, :4], 5, state)
    state = forget(state, jnp.array([5, 5]))
    pieces = [y]
    for start in (5, 9):
        y, state = extend(x[:, start : start + 4], start, state)
        pieces.append(y)
    assert relative_error(jnp.concatenate(pieces, 1)[:, :12], forward(layer, x)) < 1e-5


def test_more_tokens_than_the_cache_holds_are_nan():
    layer, x = randomize(HEAVY), activations(1, 6, EMBED)
    extend = eqx.filter_jit(lambda x, info, state: layer(x, info, state))
    y, state = extend(x, TokenInfo(jnp.arange(6)[None]), layer.init_state(1, 6))
    assert np.isfinite(y).all()
    assert np.isnan(extend(x[:, :1], TokenInfo(jnp.array([[6]])), state)[0]).all()


def test_invalid_sizes_are_refused():
    key = jax.random.key(0)
    for options, message in (
        ({"out_groups": 3}, "4 heads do not divide evenly over 3 groups"),
        ({"window": 0}, "window is 0"),
        ({"block": 0}, "block is 0"),
        ({"rotary": Rotary(8)}, "RoPE turns 8 features, and a head has 6"),
        ({"rotary": Rotary(4, scaling=DynamicScaling(2.0, 8))}, "depends on the length"),
        ({"block": 3, "indexer": INDEXER}, "of the indexer"),
        ({"indexer": INDEXER}, "of the indexer"),
    ):
        with pytest.raises(ValueError, match=message):
            LAYER(**options, key=key)
