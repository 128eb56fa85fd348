"""Mixture of block attention: reference values and choices, dense where few blocks are, caches, meshes, refusals."""

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
from zoo.layers import Attention, MixtureOfBlockAttention, TokenInfo
from zoo.ops.attention.block_selection import average_blocks, place_in_blocks, select_blocks, split_into_blocks
from zoo.ops.rotary import Rotary
from zoo.tools.testing import check_mixer

MORE = os.environ.get("ZOO_PARITY")
OPTIONS = {"kv_heads": 2, "rotary": Rotary(4)}
CHECKED = partial(MixtureOfBlockAttention, 16, 4, **OPTIONS, block=2, top=2)
SEQ = 8


@pytest.mark.ci
def test_mixture_of_blocks_keeps_its_promises():
    layout = Layout(context="gathered")
    check_mixer(CHECKED, meshes=[zoo.make_mesh(data=2, context=2, tensor=2, layout=layout)])


@pytest.mark.slow
def test_more_meshes_equal_one_device():
    """With more devices along tensor than key heads, and two shards of the sequence that cut a block."""
    gathered = partial(zoo.make_mesh, layout=Layout(context="gathered"))
    check_mixer(CHECKED, meshes=[gathered(data=1, fsdp=2, tensor=4), gathered(data=2, context=4)])


def test_few_blocks_are_attended_to_densely():
    layer = randomize(lambda key: MixtureOfBlockAttention(16, 4, **OPTIONS, block=2, top=4, key=key))
    x = activations(2, SEQ, 16)
    run = eqx.filter_jit(lambda layer: layer(x, TokenInfo())[0])
    assert isinstance(layer.attention, Attention)
    assert relative_error(run(layer), run(layer.attention)) < 1e-6
    fewer = eqx.tree_at(lambda node: node.attention, CHECKED(key=jax.random.key(0)), layer.attention)
    assert relative_error(run(fewer), run(layer.attention)) > 1e-2


@pytest.mark.skipif(not MORE, reason="ZOO_PARITY names no folder of reference cases")
@pytest.mark.parametrize("variant", mark_slow(["base", "even", "one"], but=["base"]))
def test_mixture_of_blocks_equals_reference_values(variant):
    """In float64: outputs, the gradient of every input, and the blocks that are chosen."""
    arrays = load_file(Path(str(MORE)) / "ops_more" / f"moba.{variant}.safetensors")
    inputs = [jnp.asarray(arrays[f"in.{name}"]) for name in "qkv"]
    seq, heads, size = inputs[0].shape[1:]
    layer = MixtureOfBlockAttention(heads * size, heads, block=4, top=3, key=jax.random.key(0))

    @jax.jit
    def run(inputs, weights):
        output, back = jax.vjp(lambda inputs: layer.attend_to_sequence(*inputs, TokenInfo()), inputs)
        places = place_in_blocks(jnp.arange(seq)[None], 4)
        chosen = select_blocks(inputs[0], average_blocks(split_into_blocks(inputs[1], 4)), 3, places)
        return output, back(weights)[0], chosen

    output, gradients, chosen = run(inputs, jnp.asarray(arrays["weight.o"]))
    np.testing.assert_array_equal(chosen.swapaxes(1, 2), arrays["idx.blocks"] > 0)
    assert distance(output, arrays["f64.o"]) <= 5e-6
    largest = max(np.abs(x).max() for name, x in arrays.items() if name.startswith("f64.grad."))
    for name, gradient in zip("qkv", gradients, strict=True):
        wanted = arrays[f"f64.grad.{name}"]
        assert np.abs(gradient - wanted).max() <= max(1e-4 * np.abs(wanted).max(), 1e-6 * largest), name


@pytest.mark.ci
def test_generation_with_rejected_proposals_equals_generation():
    """A proposal that is rejected leaves no trace in the keys of blocks; prompts are padded to three lengths."""
    mixer = partial(MixtureOfBlockAttention, kv_heads=1, rotary=Rotary(4), block=3, top=2)
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


def test_mixture_of_blocks_refuses_what_it_cannot_compute():
    mesh = zoo.make_mesh(context=2, devices=jax.devices()[:2])
    layer, x = CHECKED(key=jax.random.key(0)), activations(2, SEQ, 16)
    run = zoo.spmd(lambda layer, x: layer(x, TokenInfo())[0], mesh, out="batch seq embed")
    with pytest.raises(ValueError, match="'ring' cannot compute this, because tokens select keys .* gathered"):
        run(zoo.place(layer, mesh), x)
    with pytest.raises(ValueError, match="'blockwise' cannot compute this, because queries select their keys"):
        zoo.set_implementations(layer, attention="blockwise")(x, TokenInfo())
    for options, message in (
        ({"block": 0}, "block is 0: expected at least 1"),
        ({"top": 0}, "top is 0: expected at least 1"),
        ({"window": 3}, "window=3: a query attends to blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            MixtureOfBlockAttention(16, 4, **{"block": 2, "top": 2, **options}, key=jax.random.key(0))
