"""Recurrences of a sharded sequence: fresh rows, communication that does not grow with the length, refused states."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.aot import imagine
from tests.layers.random_layers import activations, randomize
from tests.quick import mark_slow
from zoo.layers import MLSTM, RGLRU, RWKV4, GatedDeltaNet, Mamba, TokenInfo
from zoo.layers.recurrent.context import RecurrenceContext
from zoo.parallel import gather

BATCH, EMBED, HEADS, SHARDS = 2, 16, 2, 4


def loss_fn(layer, x):
    y, _ = gather(layer)(x, TokenInfo())
    return (y * y).sum(), jnp.float32(y.size)


def make_context_mesh():
    return zoo.make_mesh(1, context=SHARDS, devices=jax.devices()[:SHARDS])


def find_fresh(x, segment_ids):
    packed, whole = (RecurrenceContext.from_info(x, TokenInfo(segment_ids=ids), None) for ids in (segment_ids, None))
    return packed.fresh[:, None], whole.fresh[:, None]


def test_rows_are_fresh_where_a_segment_begins():
    """A document that goes on is not fresh, nor is one that begins inside of a shard."""
    ids = np.array([[1, 1, 1, 1, 2, 2, 2, 3], [0, 0, 0, 1, 1, 1, 1, 1]])
    x = jnp.zeros((BATCH, 8, EMBED))
    packed, whole = zoo.spmd(find_fresh, make_context_mesh(), out=("batch seq", "batch seq"))(x, ids)
    assert packed.tolist() == [[True, False, True, False], [True, False, False, False]]
    assert whole.tolist() == [[True, False, False, False]] * BATCH


def test_state_of_a_sharded_sequence_is_refused():
    layer = randomize(partial(GatedDeltaNet, EMBED, HEADS))
    decode = lambda layer, x: layer(x, TokenInfo(), layer.init_state(BATCH, 8))[0]
    with pytest.raises(NotImplementedError, match="with all of its new tokens, and context shards them"):
        zoo.spmd(decode, make_context_mesh(), out="batch seq embed")(layer, jnp.zeros((BATCH, 16, EMBED)))


def test_mlstm_of_a_sharded_sequence_by_name():
    """The state before a shard is added to outputs of its tokens alone, so every implementation is possible. Pallas'
    interpreter runs on no mesh of CPUs."""
    layer, x = randomize(partial(MLSTM, EMBED, HEADS)), activations(BATCH, 16, EMBED)
    run = zoo.spmd(lambda layer, x: layer(x, TokenInfo())[0], make_context_mesh(), out="batch seq embed")
    named = {name: zoo.set_implementations(layer, recurrence=name) for name in ("recurrent", "chunked", "pallas")}
    expected = eqx.filter_jit(lambda layer: layer(x, TokenInfo())[0])(layer)
    for name in ("recurrent", "chunked"):
        np.testing.assert_allclose(run(named[name], x), expected, rtol=1e-4, atol=2e-5 * float(jnp.abs(expected).max()))
    with pytest.raises(
        ValueError, match="'pallas' cannot .* interpreter, which runs it on a CPU, does not run on a mesh"
    ):
        run(named["pallas"], x)


@pytest.mark.aot
def test_mlstm_of_a_sharded_sequence_compiles_pallas_for_tpus():
    mesh = zoo.make_mesh(data=2, context=4, devices=imagine("v5e:2x4"))
    layer = eqx.filter_eval_shape(partial(MLSTM, 128, HEADS, implementation="pallas"), key=jax.random.key(0))
    layer = zoo.place(layer, mesh)
    x = zoo.place_batch(jax.ShapeDtypeStruct((BATCH, 1024, 128), "f4"), mesh)
    program = zoo.inspect.compiled(zoo.value_and_grad(loss_fn, mesh), layer, x)
    assert program.text.count('custom_call_target="tpu_custom_call"') == 2


def test_shard_shorter_than_a_convolution_raises():
    layer = randomize(partial(GatedDeltaNet, EMBED, HEADS))
    with pytest.raises(ValueError, match="a shard of 2 tokens is too short: the next one looks back 3"):
        zoo.value(loss_fn, make_context_mesh())(layer, jnp.zeros((BATCH, 2 * SHARDS, EMBED)))


@pytest.mark.parametrize("seq", mark_slow([16, 80], but=[80]))
def test_communication_does_not_grow_with_the_sequence(seq):
    """Forward, each of n shards receives 1 + ceil(log2(n - 1)) states and one factor fewer, and for each convolution
    the width - 1 tokens before; and backward the same."""
    layer, mesh = randomize(partial(GatedDeltaNet, EMBED, HEADS)), make_context_mesh()
    x = jnp.zeros((BATCH, seq, EMBED))
    program = zoo.inspect.compiled(lambda *args: zoo.value_and_grad(loss_fn, mesh)(*args), layer, x)
    assert {row.axes for row in program.collectives} == {("context",)}
    assert {row.kind for row in program.collectives} == {"collective-permute", "all-reduce"}
    found = [(row.arrays, row.bytes) for row in program.collectives if row.kind == "collective-permute"]
    key_dim = EMBED // HEADS
    state, factor, inputs = BATCH * HEADS * key_dim**2 * 4, BATCH * HEADS * key_dim**2 * 4, BATCH * 3 * EMBED * 4
    assert found == [(2 * (3 + 2 + 3), 2 * (3 * state + 2 * factor + 3 * inputs))]


def mix_each(layers, x):
    return jnp.concatenate([layer(x, TokenInfo())[0] for layer in layers], axis=-1)


@pytest.mark.slow
def test_communication_of_elementwise_and_stabilized_recurrences():
    """A convolution needs width - 1 tokens, a token shift one, an elementwise map two states, and a stabilized one its
    sums, their maximum and a log factor."""
    factories = partial(Mamba, state_dim=3), partial(RGLRU, heads=HEADS), RWKV4, partial(MLSTM, heads=HEADS)
    layers = [randomize(partial(factory, EMBED)) for factory in factories]
    run, found = zoo.spmd(mix_each, make_context_mesh(), out="batch seq embed"), []
    for seq in (12, 80):
        x = jax.random.normal(jax.random.key(seq), (BATCH, seq, EMBED))
        program = zoo.inspect.compiled(lambda *args: run(*args), layers, x)
        found += [(row.kind, row.axes, row.bytes) for row in program.collectives]
    (key_dim, value_dim), numbers = (4, 8), BATCH * 4
    mamba = numbers * 2 * EMBED * (3 + (3 + 2) * 3)
    rg_lru = numbers * EMBED * (3 + (3 + 2))
    rwkv4 = numbers * EMBED * (1 + 3 * (2 + 1 + 1))
    mlstm = numbers * HEADS * 3 * (key_dim * (value_dim + 1) + 1 + 1)
    assert found == [("collective-permute", ("context",), mamba + rg_lru + rwkv4 + mlstm)] * 2
    x = x[:, :12]
    expected = eqx.filter_jit(mix_each)(layers, x)
    np.testing.assert_allclose(run(layers, x), expected, rtol=1e-4, atol=2e-5 * float(jnp.abs(expected).max()))
