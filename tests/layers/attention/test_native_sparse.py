"""Native sparse attention: reference values and choices, the compression's formula, caches, meshes, refusals."""

import os
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from tests.parity_ops import distance
from tests.quick import mark_slow
from zoo import Layout
from zoo.layers import Attention, NativeSparseAttention, TokenInfo
from zoo.layers.attention.native_sparse import BlockCompression
from zoo.ops.attention import AttentionMask, attention
from zoo.ops.attention.block_selection import place_in_blocks, select_keys
from zoo.ops.rotary import Rotary
from zoo.tools.testing import check_mixer

MORE = os.environ.get("ZOO_PARITY")
CHECKED = partial(NativeSparseAttention, 16, 4, kv_heads=2, rotary=Rotary(4), block=2, top=2, window=3)


def test_native_sparse_attention_keeps_its_promises():
    layout = Layout(context="gathered")
    check_mixer(CHECKED, meshes=[zoo.make_mesh(data=2, context=2, tensor=2, layout=layout)])


@pytest.mark.slow
def test_query_heads_on_several_devices_choose_together():
    """With more devices along tensor than key heads, and two shards of the sequence that cut a block."""
    gathered = partial(zoo.make_mesh, layout=Layout(context="gathered"))
    check_mixer(CHECKED, meshes=[gathered(data=1, fsdp=2, tensor=4), gathered(data=2, context=4)])


def test_query_heads_of_a_key_head_choose_together_on_a_mesh():
    """On four devices, two of them share a key head; queries are large, so that their choices differ."""
    layer = randomize(partial(NativeSparseAttention, 16, 4, kv_heads=2, block=2, top=2, window=1))
    layer = eqx.tree_at(lambda node: node.attention.query.weight, layer, 9 * layer.attention.query.weight)
    x = activations(1, 12, 16)
    run = lambda layer, x: layer(x, TokenInfo())[0]
    mesh = zoo.make_mesh(data=1, tensor=4, devices=jax.devices()[:4])
    sharded = zoo.spmd(run, mesh, out="batch seq embed")(zoo.place(layer, mesh), x)
    assert relative_error(sharded, eqx.filter_jit(run)(layer, x)) < 1e-5


def test_compression_equals_formula():
    compress = randomize(lambda key: BlockCompression(3, 4, key=key))
    x = activations(2, 5, 3, 2, 4)
    blocks = eqx.filter_jit(compress)(x)
    assert blocks.shape == (2, 5, 2, 4)
    placed = np.asarray(x[1, 4, :, 1] + compress.positions).reshape(-1)
    hidden = jax.nn.gelu(np.asarray(compress.up.weight) @ placed)
    assert relative_error(blocks[1, 4, 1], compress.down.weight @ hidden) < 1e-5


@pytest.mark.skipif(not MORE, reason="ZOO_PARITY names no folder of reference cases")
@pytest.mark.parametrize("variant", mark_slow(["base", "even", "one"], but=["base"]))
def test_native_sparse_attention_equals_reference_values(variant):
    """In float64: outputs, the gradient of every input, and the blocks that are chosen."""
    arrays = load_file(Path(str(MORE)) / "ops_more" / f"nsa.{variant}.safetensors")
    inputs = {name.removeprefix("in."): jnp.asarray(x) for name, x in arrays.items() if name.startswith("in.")}
    seq, heads, size = inputs["q"].shape[1:]
    options = {"kv_heads": 2, "block": 4, "top": 3, "window": 5}
    layer = NativeSparseAttention(heads * size, heads, **options, key=jax.random.key(0))
    places = place_in_blocks(jnp.arange(seq)[None], 4)

    def mix(inputs):
        chosen = layer.choose_blocks(inputs["q"], inputs["kc"], places)
        mask = AttentionMask(True, selected=select_keys(chosen, places.own))
        tokens, blocks = (inputs["k"], inputs["v"]), (inputs["kc"], inputs["vc"])
        return layer.mix_branches(inputs["q"], tokens, blocks, inputs["gate"], mask, places, attention), chosen

    @jax.jit
    def run(inputs, weights):
        output, back, chosen = jax.vjp(mix, inputs, has_aux=True)
        return output, back(weights)[0], chosen

    output, gradients, chosen = run(inputs, jnp.asarray(arrays["weight.o"]))
    np.testing.assert_array_equal(chosen.swapaxes(1, 2), arrays["idx.blocks"] > 0)
    assert distance(output, arrays["f64.o"]) <= 5e-6
    largest = max(np.abs(x).max() for name, x in arrays.items() if name.startswith("f64.grad."))
    for name, gradient in gradients.items():
        wanted = arrays[f"f64.grad.{name}"]
        assert np.abs(gradient - wanted).max() <= max(1e-4 * np.abs(wanted).max(), 1e-6 * largest), name


def test_open_window_is_attention_in_a_window():
    """With the gates of the other branches closed."""
    layer, x = randomize(CHECKED), activations(2, 7, 16)
    only_window = jnp.tile(jnp.array([-1e3, -1e3, 1e3]), 4)
    layer = eqx.tree_at(lambda node: node.gate, layer, layer.gate.with_weight(0 * layer.gate.weight, only_window))
    windowed = Attention(16, 4, kv_heads=2, rotary=Rotary(4), window=3, key=jax.random.key(0))
    windowed = jax.tree.unflatten(jax.tree.structure(windowed), jax.tree.leaves(layer.attention))
    ours, expected = eqx.filter_jit(lambda *layers: [layer(x, TokenInfo())[0] for layer in layers])(layer, windowed)
    assert relative_error(ours, expected) < 1e-6


def test_native_sparse_attention_refuses_what_it_cannot_compute():
    mesh = zoo.make_mesh(context=2, devices=jax.devices()[:2])
    layer, x = CHECKED(key=jax.random.key(0)), activations(2, 8, 16)
    run = zoo.spmd(lambda layer, x: layer(x, TokenInfo())[0], mesh, out="batch seq embed")
    with pytest.raises(ValueError, match="'ring' cannot compute this, because tokens select keys .* gathered"):
        run(zoo.place(layer, mesh), x)
    for options, message in (
        ({"window": 0}, "window is 0: expected at least 1"),
        ({"sinks": True}, "sinks=True: native sparse attention has three softmaxes"),
    ):
        with pytest.raises(ValueError, match=message):
            CHECKED(**options, key=jax.random.key(0))
