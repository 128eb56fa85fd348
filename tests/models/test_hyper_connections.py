"""Hyper-connections: one stream with identity weights is the pre-norm block; loops, meshes, decoding and adapters."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.jaxprs import equations
from tests.layers.random_layers import activations, randomize, relative_error
from tests.parallel.any_mesh import assert_same_step, differentiate, make_any_mesh
from zoo.layers import Attention, Dropout, GatedMLP, RMSNorm, TokenInfo
from zoo.models import Block, Hidden
from zoo.models.hyper_connections import (
    HyperConnection,
    HyperConnectionBlock,
    HyperConnectionInputs,
    HyperConnectionNorm,
    IndependentHyperConnection,
)
from zoo.parallel import SEQUENCE
from zoo.tools.plan.inlining import Scan
from zoo.tools.report.parameters import describe_model

KEY = jax.random.key(0)
VOCAB, EMBED, STREAMS, LAYERS = 32, 16, 3, 2
TOKENS = jax.random.randint(jax.random.key(1), (4, 8), 0, VOCAB)
BATCH = {"tokens": TOKENS, "targets": TOKENS}


def make(key=KEY, **options):
    sizes: dict[str, Any] = {
        "vocab": VOCAB,
        "embed": EMBED,
        "layers": LAYERS,
        "heads": 4,
        "mlp": 32,
        "streams": STREAMS,
    }
    return zoo.models.Transformer(**sizes | options, key=key)


@functools.cache
def make_random():
    """Weights that depend on the token as much as on the layer: the first ones hardly do."""
    return randomize(make)


@functools.cache
def expected():
    return differentiate(zoo.configure(make_random(), loop="plain"), BATCH)


def test_one_stream_with_identity_weights_is_the_pre_norm_block():
    parts = {
        "mixer": randomize(lambda key: Attention(EMBED, 4, key=key)),
        "mixer_norm": RMSNorm(EMBED),
        "ffn": randomize(lambda key: GatedMLP(EMBED, 20, key=key)),
        "ffn_norm": RMSNorm(EMBED),
        "dropout": Dropout(0.3),
    }
    connection = HyperConnection(EMBED, 1, key=KEY)
    identity = lambda x: (x.scale, x.base)  # sigmoid(40) = 1, 2 sigmoid(0) = 1, and one number is doubly stochastic
    connection = eqx.tree_at(identity, connection, (jnp.zeros(3), jnp.asarray([40.0, 0.0, 0.0])))
    block = HyperConnectionBlock(mixer_connection=connection, ffn_connection=connection, **parts)
    hidden, info = Hidden(activations(2, 5, EMBED)), TokenInfo(keys=jax.random.split(KEY, 2))
    ours, wanted = (eqx.filter_jit(block)(hidden, info)[0].x for block in (block, Block(**parts)))
    assert relative_error(ours, wanted) < 1e-5


def test_it_begins_as_one_stream():
    """Equal streams stay almost equal, each the residual stream of a plain Transformer with half its sum as input."""
    connection = HyperConnection(EMBED, STREAMS, key=KEY)
    x = activations(4, 8, EMBED)
    streams = HyperConnectionInputs(STREAMS)(TOKENS, x).x
    assert streams.shape == (4, 8, STREAMS * EMBED)
    read, weights = connection.read(streams)
    assert relative_error(read, STREAMS / 2 * x) < 2e-2
    assert np.abs(weights.post - 1).max() < 5e-2 and np.diagonal(weights.comb, axis1=-2, axis2=-1).min() > 0.9


@pytest.mark.parametrize("loop", ["scan", pytest.param("ahead", marks=pytest.mark.ci)])
def test_a_scan_equals_the_plain_loop(loop):
    assert_same_step(differentiate(zoo.configure(make_random(), loop=loop, remat="full"), BATCH), expected())


@pytest.mark.parametrize(
    "sizes",
    [{"data": 2, "fsdp": 2, "tensor": 2}, pytest.param({"data": 2, "context": 2, "tensor": 2}, marks=pytest.mark.ci)],
)
def test_meshes_equal_one_device(sizes):
    assert_same_step(differentiate(make_random(), BATCH, make_any_mesh(**sizes)), expected())


@pytest.mark.ci
def test_sequence_parallelism_and_pipelines_equal_one_device():
    model = zoo.configure(make_random(), loop="scan", remat="full")
    assert_same_step(differentiate(model, BATCH, make_any_mesh(SEQUENCE, fsdp=2, tensor=2)), expected())
    assert_same_step(differentiate(model, BATCH, make_any_mesh(fsdp=2, pipe=2)), expected())


def test_decoding_equals_the_full_pass():
    model = make_random()
    new = zoo.generate(model, TOKENS, max_new_tokens=3)
    longer = jnp.concatenate([TOKENS, new], axis=1)
    np.testing.assert_array_equal(jnp.argmax(eqx.filter_jit(model)(longer), -1)[:, TOKENS.shape[1] - 1 : -1], new)


def test_rematerialization_saves_the_streams_of_a_layer():
    """And not `comb`, which is computed again."""
    model = zoo.configure(make_random(), loop="scan", remat="full")
    jaxpr = jax.make_jaxpr(eqx.filter_grad(lambda model: zoo.cross_entropy(model, BATCH)[0]))(model)
    forward = next(equation for equation in equations(jaxpr) if equation.primitive.name == "scan")
    shapes = [x.aval.shape for x in forward.outvars[Scan.of(forward).carries :]]
    assert [shape for shape in shapes if len(shape) > 3] == [(LAYERS, *TOKENS.shape, STREAMS * EMBED)]


@pytest.mark.parametrize("method", ["lora", pytest.param("dora", marks=pytest.mark.ci)])
def test_adapters_wrap_the_linears_of_sublayers(method):
    model = make_random()
    adapted = getattr(zoo.adapters, method)(model, rank=2, targets=("query", "down"), key=KEY)
    trained = jax.tree.map(lambda x: x + 0.1 * activations(*x.shape), zoo.trainable(adapted))
    adapted = eqx.combine(trained, adapted)
    logits = eqx.filter_jit(adapted)(TOKENS)
    assert relative_error(logits, eqx.filter_jit(model)(TOKENS)) > 1e-3
    assert relative_error(eqx.filter_jit(zoo.adapters.merge(adapted))(TOKENS), logits) < 1e-4
    names = {path.name for path in zoo.models.list_parameter_paths(trained)}
    assert all(".attention.query." in name or ".gated_mlp.down." in name for name in names)


def test_weights_stay_in_float32():
    model = zoo.cast(make_random(), jnp.bfloat16)
    connections = [x for x in jax.tree.leaves(model, is_leaf=is_connection) if is_connection(x)]
    assert {x.dtype for x in jax.tree.leaves(connections) if x.ndim} == {jnp.dtype(jnp.float32)}
    assert model.norm.projection.weight.dtype == jnp.float32
    logits, wanted = (eqx.filter_jit(each)(TOKENS) for each in (model, make_random()))
    assert relative_error(logits.astype(jnp.float32), wanted) < 5e-2


def is_connection(x):
    return isinstance(x, HyperConnection)


def test_it_is_described_and_drawn():
    model = eqx.filter_eval_shape(make)
    mesh = make_any_mesh(fsdp=2, tensor=2)
    size = STREAMS * (STREAMS + 2)
    summary = zoo.summary(model, mesh=mesh)
    rows = {row.name: row for row in summary.rows}
    assert rows["layers.*.ffn_connection.projection.weight"].shape == (LAYERS, size, STREAMS * EMBED)
    assert rows["norm.projection.weight"].shape == (STREAMS, STREAMS * EMBED)
    assert "2 layers of Attention and GatedMLP" in describe_model(model)
    assert "HyperConnectionBlock" in str(model) and "mixer_connection" in str(model)
    assert "mixer_connection" in zoo.tools.draw.draw_layout(model, mesh)
    names = zoo.capture_names(make_random(), TOKENS)
    assert names["layers.*"].shape == (LAYERS, *TOKENS.shape, STREAMS * EMBED)


def test_no_streams_and_no_iterations_are_refused():
    with pytest.raises(ValueError, match="one residual stream or more, not streams=0"):
        make(streams=0)
    with pytest.raises(ValueError, match="one residual stream or more, not streams=0"):
        HyperConnectionNorm(EMBED, 0, lambda: RMSNorm(EMBED), key=KEY)
    with pytest.raises(ValueError, match="normalized once or more, not iterations=0"):
        HyperConnection(EMBED, 2, iterations=0, key=KEY)
    with pytest.raises(ValueError, match="one residual stream or more, not streams=0"):
        IndependentHyperConnection(EMBED, 0, key=KEY)


OPTIONS = {"magnitude": 1.5, "epsilon": 0.1, "norm_epsilon": 0.2}


def test_independent_streams_equal_their_formula():
    connection = randomize(lambda key: IndependentHyperConnection(EMBED, STREAMS, **OPTIONS, key=key))
    x, output = activations(2, 3, STREAMS * EMBED), activations(2, 3, EMBED, seed=2)
    read, post = connection.read(x)
    written = connection.write(x, output, post)
    W, scale, base = (np.asarray(a) for a in (connection.projection.weight, connection.scale, connection.base))
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    for row, t in np.ndindex(2, 3):
        flat = np.asarray(x[row, t], np.float64)
        logits = W @ (flat / np.sqrt((flat**2).mean() + 0.2))
        pre = sigmoid(scale[0] * logits[:STREAMS] + base[:STREAMS]) + 0.1
        after = 1.5 * sigmoid(scale[1] * logits[STREAMS:] + base[STREAMS:]) + 0.1
        streams = flat.reshape(STREAMS, EMBED)
        np.testing.assert_allclose(read[row, t], pre @ streams, atol=1e-5)
        wanted = streams + after[:, None] * np.asarray(output[row, t])
        np.testing.assert_allclose(written[row, t], wanted.reshape(-1), atol=1e-5)


def test_independent_streams_begin_as_their_mean():
    """Up to `epsilon` and the small part that depends on the token; at magnitude 2 each stream gets the output."""
    connection = IndependentHyperConnection(EMBED, STREAMS, key=KEY)
    read, post = connection.read(jnp.tile(activations(2, 3, EMBED), STREAMS))
    np.testing.assert_allclose(read, activations(2, 3, EMBED), atol=0.1)
    np.testing.assert_allclose(post, 1, atol=0.05)
    assert zoo.cast(connection, jnp.bfloat16).projection.weight.dtype == jnp.float32
