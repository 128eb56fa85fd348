"""Attention within a sharded sequence equals one device in all forms, moves the bytes of the formula, and refuses."""

import functools
import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from tests.aot import imagine
from tests.layers.random_layers import activations, randomize
from zoo import Layout
from zoo.layers import Attention, ForgettingAttention, LatentAttention, TokenInfo
from zoo.layers.abstract import AbstractMixer
from zoo.layers.attention.context import CONTEXT_ATTENTION
from zoo.layers.token_info import pack_positions
from zoo.ops.rotary import Rotary
from zoo.parallel import Module, gather
from zoo.parallel.layout import CONTEXT_FORMS

ROWS, SEQ, EMBED, HEADS = 4, 32, 16, 8
OPTIONS = {"head_dim": 4, "kv_heads": 4, "rotary": Rotary(4), "window": 6, "soft_cap": 1.5, "sinks": True}
WINDOW = partial(Attention, EMBED, HEADS, **OPTIONS)
LATENTS = partial(LatentAttention, EMBED, HEADS, latent=6, head_dim=4, value_dim=3, rotary=Rotary(2))
FORGETS = partial(ForgettingAttention, EMBED, HEADS, head_dim=4, kv_heads=4)
BLOCKS = partial(Attention, EMBED, HEADS, head_dim=4, kv_heads=4, window=11, block=7)
"""Blocks that straddle shards of four tokens."""
PLAIN = WINDOW, LATENTS
MASKED = FORGETS, BLOCKS


class Layers(Module):
    """Two mixers, one after the other, so that gradients flow through inputs."""

    mixers: tuple[AbstractMixer, ...]

    def __call__(self, x, info):
        for mixer in self.mixers:
            x = x + gather(mixer)(x, info)[0]
        return x


@functools.cache
def make_layers(*factories):
    return Layers(tuple(map(randomize, factories)))


def make_batch(seq=SEQ):
    """Documents that straddle the devices, in all rows but the last, and padding at the end."""
    ends = np.array([[5, 21, 30], [9, 10, 32], [13, 14, 29], [32, 32, 32]])
    segment_ids = 1 + (np.arange(seq) >= ends[:, :, None]).sum(1)
    segment_ids = np.where(np.arange(seq) < ends[:, -1:], segment_ids, 0)
    return activations(ROWS, seq, EMBED), activations(ROWS, seq, EMBED, seed=2), jnp.asarray(segment_ids)


def loss_fn(layers, batch):
    x, weights, segment_ids, *positions = batch
    y = layers(x, TokenInfo(*positions, segment_ids=segment_ids))
    return (y * weights).sum(), jnp.float32(y.size)


@eqx.filter_jit
@eqx.filter_value_and_grad
def serial(layers, batch):
    return loss_fn(layers, batch)[0] / (ROWS * SEQ * EMBED)


def check_equals_one_device(mesh, batch, factories=PLAIN):
    layers = make_layers(*factories)
    loss, gradients = jax.device_get(zoo.value_and_grad(loss_fn, mesh)(zoo.place(layers, mesh), batch))
    expected_loss, expected_gradients = jax.device_get(serial(layers, batch))
    terms = float(jnp.abs(batch[1]).mean())
    assert abs(loss - expected_loss) < 1e-5 * max(abs(expected_loss), terms)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max()


def make_mesh(form="ring", **sizes):
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    return zoo.make_mesh(**{"data": 1} | sizes, devices=devices, layout=Layout(context=form))


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        ("gathered", {"fsdp": 2, "context": 4}),
        ("heads", {"data": 2, "context": 2, "tensor": 2}),
        pytest.param("ring", {"context": 8}, marks=pytest.mark.slow),
        # test_ring_attention_of_any_documents_equals_one_device holds this form by default
        pytest.param("ring", {"data": 2, "context": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_context_attention_equals_one_device(form, sizes):
    """Windows, soft caps, sinks, grouped queries and latents, in documents that straddle the devices."""
    check_equals_one_device(make_mesh(form, **sizes), make_batch())


def test_heads_that_are_exchanged_have_their_own_sinks():
    mixer, x = randomize(partial(Attention, EMBED, 4, sinks=True)), activations(2, 8, EMBED)
    mix = lambda mixer, x: mixer(x, TokenInfo())[0]
    found = zoo.spmd(mix, make_mesh("heads", context=2), out="batch seq embed")(mixer, x)
    expected = eqx.filter_jit(mix)(mixer, x)
    assert jnp.abs(found - expected).max() <= 1e-5 * jnp.abs(expected).max()


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        ("ring", {"context": 8}),
        ("gathered", {"fsdp": 2, "context": 4}),
        ("heads", {"data": 2, "context": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_forget_gates_and_blocks_equal_one_device(form, sizes):
    """Blocks of documents, which begin anywhere in a shard."""
    x, weights, segment_ids = make_batch()
    check_equals_one_device(make_mesh(form, **sizes), (x, weights, segment_ids, pack_positions(segment_ids)), MASKED)


@pytest.mark.ci
@settings(max_examples=8)
@given(seed=st.integers(0, 999), often=st.sampled_from([0.0, 0.05, 0.3, 0.9]), padded=st.booleans())
def test_ring_attention_of_any_documents_equals_one_device(seed, often, padded):
    """Documents of one token to all of a row, padding at both ends; a document may be in one device or in all."""
    draw = np.random.default_rng(seed)
    first, last = np.sort(draw.integers(0, SEQ + 1, (2, ROWS, 1)), axis=0) if padded else (0, SEQ)
    places = np.arange(SEQ)
    segment_ids = (1 + (draw.random((ROWS, SEQ)) < often).cumsum(1)) * ((first <= places) & (places < last))
    x, weights, _ = make_batch()
    batch = x, weights, jnp.asarray(segment_ids)
    mesh = make_mesh("ring", context=8)
    check_equals_one_device(mesh, batch)
    check_equals_one_device(mesh, (*batch, pack_positions(batch[2])), MASKED)


def count_bytes(mesh, mixer, seq):
    """Return the bytes of the collectives of a gradient on one device, by kind, along context."""

    def loss(mixer, x):
        y, _ = mixer(x, TokenInfo())
        return (y * y).sum(), jnp.float32(y.size)

    x = zoo.place_batch(jnp.zeros((ROWS, seq, EMBED)), mesh)
    program = zoo.inspect.compiled(zoo.value_and_grad(loss, mesh), zoo.place(mixer, mesh), x)
    return {row.kind: row.bytes for row in program.collectives if row.axes == ("context",)}


def test_ring_moves_the_bytes_of_its_formula():
    """Per token: keys and values go round forward, and with their gradients backward, as far as the window reaches.
    Without a window, zigzag adds queries, keys, values and outputs, and each again as gradients."""
    query = output = 4 * 16
    kv, shards = 4 * 2 * 8, 4
    for seq, window, steps, zigzag in ((16, None, shards - 1, 2 * (query + kv + output)), (32, 10, 2, 0)):
        mixer = Attention(EMBED, 4, kv_heads=2, head_dim=4, window=window, key=jax.random.key(0))
        moved = count_bytes(make_mesh(context=shards), mixer, seq)
        assert moved["collective-permute"] == ROWS * seq // shards * ((2 * steps + steps + 1) * kv + zigzag)
        assert set(moved) <= {"collective-permute", "all-reduce"}


def test_zigzag_of_two_shards_keeps_the_half_that_stays():
    mesh = make_mesh(context=2, data=1)
    mixer = zoo.place(Attention(EMBED, 4, head_dim=4, key=jax.random.key(0)), mesh)
    mix = zoo.spmd(lambda mixer, x: mixer(x, TokenInfo())[0], mesh, out="batch seq embed")
    text = eqx.filter_jit(mix).lower(mixer, jnp.zeros((ROWS, 16, EMBED))).as_text()
    pairs = re.findall(r"source_target_pairs = dense<\[\[(\d), (\d)\], \[(\d), (\d)\]\]>", text)
    assert len(pairs) == 6  # keys and values go round; one half of each and of queries and outputs is dealt out
    assert all(source != target for pair in pairs for source, target in (pair[:2], pair[2:]))


@pytest.mark.slow
def test_other_forms_and_latents_move_their_bytes():
    """Per token: with "heads" queries, keys, values and outputs once forward, and their gradients once backward; with
    "gathered" the keys and values of all devices, and the sums of their gradients. Of latent attention, latents and
    the shared rotated keys go round, not heads."""
    seq, shards, query, kv = 16, 4, 4 * 16, 4 * 2 * 16
    mixer = Attention(EMBED, 4, head_dim=4, key=jax.random.key(0))
    tokens = ROWS * seq // shards
    assert count_bytes(make_mesh("heads", context=shards), mixer, seq)["all-to-all"] == tokens * 2 * (2 * query + kv)
    moved = count_bytes(make_mesh("gathered", context=shards), mixer, seq)
    assert moved["all-gather"] == moved["reduce-scatter"] == shards * tokens * kv
    latents, steps = 4 * (6 + 2), shards - 1
    zigzag = 2 * 4 * HEADS * ((4 + 2) + 3) + 2 * latents
    moved = count_bytes(make_mesh("ring", context=shards), LATENTS(key=jax.random.key(0)), seq)
    assert moved["collective-permute"] == tokens * ((3 * steps + 1) * latents + zigzag)


def test_layouts_and_forms_have_the_same_names():
    assert CONTEXT_ATTENTION.names[1:] == CONTEXT_FORMS
    with pytest.raises(ValueError, match="one of ring, heads, gathered, not 'striped'"):
        Layout(context="striped")


def trace(mesh, mixer):
    """Trace a call of a mixer for a sequence of 16 tokens."""
    run = zoo.spmd(lambda mixer, x: mixer(x, TokenInfo())[0], mesh, out="batch seq embed")
    return eqx.filter_eval_shape(run, mixer, jnp.zeros((ROWS, 16, EMBED)))


def test_forms_refuse_by_name():
    few = Attention(EMBED, 4, kv_heads=2, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"the 2 KV heads of a device .* over context=4: .*These can: ring, gathered"):
        trace(make_mesh("heads", context=4), few)
    named = zoo.set_implementations(few, attention="grouped")
    with pytest.raises(ValueError, match=r"'ring' cannot .* the layer names 'grouped'. These can: gathered"):
        trace(make_mesh("ring", context=4), named)
    assert trace(make_mesh("gathered", context=4), named).shape == (ROWS, 16, EMBED)


def test_implementations_name_the_form():
    make = partial(zoo.models.Transformer, vocab=16, embed=16, layers=1, heads=4, mlp=16)
    model = eqx.filter_eval_shape(make, key=jax.random.key(0))
    mesh = make_mesh("heads", context=4)
    chosen = {row.operation: row.chosen for row in zoo.inspect.implementations(model, seq_len=16, mesh=mesh).rows}
    assert (chosen["context attention"], chosen["attention"]) == ("heads", "grouped")
    decoding = zoo.inspect.implementations(model, seq_len=16, mesh=make_mesh("ring", context=4), decoding=True)
    assert {row.operation: row.chosen for row in decoding.rows}["attention to some of the keys"] == "grouped"


@pytest.mark.slow
def test_adapter_dropout_of_latents_follows_places_in_the_row():
    """Dropout masks of latents depend on their place in the row, so devices then exchange keys, not latents. Shards of
    three tokens go round in the order of the row."""
    layer = randomize(LATENTS)
    layer = zoo.adapters.lora(layer, targets=("key_up",), rank=2, dropout=0.5, key=jax.random.key(1))
    layer = jax.tree.map(lambda x: x + 0.2 if eqx.is_inexact_array(x) else x, layer)
    x, key = activations(ROWS, 12, EMBED), jax.random.key(2)

    def run(layer, x, key):
        key_up = layer.key_up.with_dropout_keys(TokenInfo(keys=key), 0)
        return eqx.tree_at(lambda layer: layer.key_up, layer, key_up)(x, TokenInfo())[0]

    expected_y = eqx.filter_jit(run)(layer, x, jax.random.split(key, ROWS))
    y = zoo.spmd(run, make_mesh(context=4), out="batch seq embed")(layer, x, key=key)
    assert jnp.abs(y - expected_y).max() <= 1e-5 * jnp.abs(expected_y).max()


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:8"])
def test_ring_compiles_for_accelerators(topology):
    """The gradient of latent attention, whose keys go round four devices beside two of fsdp."""
    mesh = zoo.make_mesh(data=1, fsdp=2, context=4, devices=imagine(topology))
    layers = zoo.place(eqx.filter_eval_shape(lambda: Layers((randomize(LATENTS),))), mesh)
    x, segment_ids = (
        jax.ShapeDtypeStruct((ROWS, 1024, *dims), dtype) for dims, dtype in (((EMBED,), "f4"), ((), "i4"))
    )
    batch = zoo.place_batch((x, x, segment_ids), mesh)
    program = zoo.inspect.compiled(zoo.value_and_grad(loss_fn, mesh), layers, batch)
    moved = {(row.kind, row.axes) for row in program.collectives}
    assert ("collective-permute", ("context",)) in moved and ("all-gather", ("context",)) not in moved
