"""Gated residual streams and blocks with a memory of n-grams: formulas, meshes, decoding, packed texts, adapters."""

import functools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from tests.parallel.any_mesh import assert_same_step, differentiate, make_any_mesh
from zoo import Layout
from zoo.layers import Attention, GatedMLP, IdentityNorm, IndexedAttention, MeanKeyIndexer, TokenInfo
from zoo.layers.ngram import NGramMemory
from zoo.layers.norm import StreamNorm
from zoo.models import Hidden
from zoo.models.build import build_decoder
from zoo.models.gated_connections import GatedConnection, make_gated_connections, make_ngram_block
from zoo.models.hyper_connections import HyperConnectionBlock
from zoo.ops.rotary import Rotary
from zoo.parallel import SEQUENCE

KEY = jax.random.key(0)
VOCAB, EMBED, STREAMS, END = 32, 16, 2, 3
TOKENS = jax.random.randint(jax.random.key(1), (4, 20), 0, VOCAB)
BATCH = {"tokens": TOKENS, "targets": TOKENS}


def make(key=KEY, keeps_tokens=True):
    """Two layers with a memory, of attention and of indexed attention, and one without between them."""
    memory = partial(NGramMemory, EMBED, VOCAB, size=13, boundary=END, streams=STREAMS, memory=8, heads=2, multiple=8)
    indexer = partial(MeanKeyIndexer, EMBED, 4, head_dim=6, block=2, top=2)
    indexed = partial(IndexedAttention, EMBED, 4, indexer=indexer, rotary=Rotary(4))
    attention = partial(Attention, EMBED, 4, rotary=Rotary(4))
    ffn = partial(GatedMLP, EMBED, 32)
    wiring = make_gated_connections(EMBED, STREAMS, 6, keeps_tokens=keeps_tokens, key=jax.random.fold_in(key, 1))
    blocks = [partial(make_ngram_block, partial(memory, number=n), jax.random.fold_in(key, 2 + n)) for n in range(2)]
    wiring["block"] = [blocks[0], HyperConnectionBlock, blocks[1]]
    layers = [(attention, ffn), (attention, ffn), (indexed, ffn)]
    return build_decoder(vocab=VOCAB, embed=EMBED, layers=layers, norm=IdentityNorm, tied=False, key=key, **wiring)


@functools.cache
def make_random():
    return randomize(make)


@functools.cache
def expected():
    return differentiate(make_random(), BATCH)


def test_a_connection_equals_its_formula():
    norm = partial(StreamNorm, EMBED, STREAMS)
    connection = randomize(lambda key: GatedConnection(EMBED, STREAMS, 6, norm, key=key))
    x, output = activations(1, 3, STREAMS * EMBED), activations(2, 3, EMBED)[:1]
    read, weights = connection.read(x)
    normed = np.asarray(connection.norm(x), np.float64)
    down, up, inject = (
        np.asarray(part.weight, np.float64) for part in (connection.down, connection.up, connection.inject)
    )
    hidden = normed @ down.T / STREAMS
    gates = 1 / (1 + np.exp(-(hidden / (1 + np.exp(-hidden))) @ up.T))
    np.testing.assert_allclose(read, (gates * normed).reshape(1, 3, STREAMS, EMBED).mean(2), rtol=1e-5, atol=1e-6)
    shares = 2 / (1 + np.exp(-normed @ inject.T / STREAMS))
    written = np.asarray(x).reshape(1, 3, STREAMS, EMBED) + shares[..., None] * np.asarray(output)[:, :, None]
    np.testing.assert_allclose(connection.write(x, output, weights), written.reshape(x.shape), rtol=1e-5, atol=1e-6)


def test_the_head_reads_the_streams_by_gates():
    norm = make_random().norm
    assert norm.connection.inject is None
    x = activations(1, 3, STREAMS * EMBED)
    np.testing.assert_array_equal(norm(x), norm.connection.read(x)[0])


@pytest.mark.ci
@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "tensor": 2},
        {"fsdp": 2, "tensor": 2, "layout": SEQUENCE},
        {"data": 2, "context": 2, "layout": Layout(context="gathered")},
    ],
    ids=["tensor", "sequence", "context"],
)
def test_meshes_equal_one_device(mesh):
    assert_same_step(differentiate(make_random(), BATCH, make_any_mesh(**mesh)), expected())


def test_decoding_equals_the_full_pass():
    model = make_random()
    mask = jnp.arange(20) >= jnp.array([0, 3, 7, 19])[:, None]
    new = zoo.generate(model, TOKENS, mask=mask, max_new_tokens=4)
    forward = eqx.filter_jit(model)
    for row, start in enumerate((0, 3, 7, 19)):
        text = jnp.concatenate([TOKENS[row, start:], new[row]])[None]
        np.testing.assert_array_equal(jnp.argmax(forward(text), -1)[0, 19 - start : -1], new[row])


@pytest.mark.ci
def test_decoding_on_a_mesh_equals_one_device():
    model = make_random()
    mesh = zoo.make_mesh(data=2, context=2, tensor=2, layout=Layout(context="gathered"))
    found = zoo.generate(zoo.place(model, mesh), TOKENS, max_new_tokens=4, mesh=mesh)
    np.testing.assert_array_equal(found, zoo.generate(model, TOKENS, max_new_tokens=4))


def test_packed_texts_equal_texts_alone():
    model = make_random()
    ids = jnp.repeat(jnp.array([1, 2]), jnp.array([11, 9]))[None]
    positions = jnp.concatenate([jnp.arange(11), jnp.arange(9)])[None]
    run = eqx.filter_jit(model)
    packed = run(TOKENS[:1], positions=positions, segment_ids=ids)
    alone = jnp.concatenate([run(TOKENS[:1, :11]), run(TOKENS[:1, 11:])], axis=1)
    assert relative_error(packed, alone) < 1e-4


@pytest.mark.parametrize("method", ["lora", pytest.param("dora", marks=pytest.mark.ci)])
def test_adapters_wrap_linears_of_sublayers_and_connections(method):
    model = make_random()
    adapted = getattr(zoo.adapters, method)(model, rank=2, targets=("query", "memory.value"), key=KEY)
    trained = jax.tree.map(lambda x: x + 0.1 * activations(*x.shape), zoo.trainable(adapted))
    adapted = eqx.combine(trained, adapted)
    logits = eqx.filter_jit(adapted)(TOKENS)
    assert relative_error(logits, eqx.filter_jit(model)(TOKENS)) > 1e-3
    assert relative_error(eqx.filter_jit(zoo.adapters.merge(adapted))(TOKENS), logits) < 1e-4
    assert any("memory.value" in path.name for path in zoo.models.list_parameter_paths(trained))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="one residual stream or more, not streams=0"):
        make_gated_connections(EMBED, 0, 6, key=KEY)
    with pytest.raises(TypeError, match="keeps_tokens=True"):
        make(keeps_tokens=False)(TOKENS)
    block = next(make_random().stack.iter_blocks())
    with pytest.raises(TypeError, match="reads the ids of tokens"):
        block(Hidden(activations(1, 4, STREAMS * EMBED)), TokenInfo())
