"""A model with some of the layers of another, or with other mixers."""

import json
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import Attention, GatedDeltaNet, GatedMLP, RMSNorm
from zoo.layers.recurrent.from_attention import copy_to_gated_delta_net
from zoo.models import build_decoder, keep_layers, list_parameter_paths, replace_mixers
from zoo.models.decoder import UnrolledStack
from zoo.models.stack import swap_stack

KEY = jax.random.key(0)
FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("layers", [[0, 2, 4], [5, 0]])
def test_kept_layers_are_layers_of_the_model(layers):
    """Of two kinds, in any order."""
    attend = partial(Attention, heads=2)
    pattern = [partial(Attention, heads=2, window=2), attend, attend]
    model = zoo.models.Hybrid(vocab=32, embed=16, layers=6, pattern=pattern, mlp=16, key=KEY)
    blocks = list(model.stack.iter_blocks())
    plain = swap_stack(model, lambda stack: UnrolledStack(tuple(blocks[layer] for layer in layers)))
    kept = keep_layers(model, layers)
    assert kept.stack.count_layers() == len(layers)
    tokens = jnp.arange(16).reshape(2, 8)
    np.testing.assert_allclose(kept(tokens), plain(tokens), rtol=1e-5, atol=1e-5)


def test_layers_that_cannot_be_kept_are_refused():
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=16, key=KEY)
    with pytest.raises(ValueError, match="there is no layer 2: the model has layers 0 to 1"):
        keep_layers(model, [0, 2])
    with pytest.raises(ValueError, match="at least one layer"):
        keep_layers(model, [])
    with pytest.raises(TypeError, match="UnrolledStack"):
        keep_layers(swap_stack(model, lambda stack: stack.unstack()), [0])
    edited = zoo.patch(model, {"layers.1": lambda x: 2 * x})
    with pytest.raises(ValueError, match=r"keep_layers takes .* an edit of layers.1 .* pass zoo.unpatch\(model\)"):
        keep_layers(edited, [1])
    with pytest.raises(ValueError, match="replace_mixers takes the model apart, and an edit of layers.1"):
        replace_mixers(edited, {0: copy_of(0)})
    config = json.loads((FIXTURES / "zamba2" / "config.json").read_text())
    assert config["num_mem_blocks"], "blocks of a Zamba 2 share their attention"
    with pytest.raises(NotImplementedError, match="depend on one another"):
        keep_layers(zoo.load(FIXTURES / "zamba2"), [0])


def copy_of(layer):
    """Return a function that copies attention to a gated delta net, with a key of its own."""
    return partial(copy_to_gated_delta_net, key=jax.random.fold_in(KEY, layer))


@pytest.fixture(scope="module")
def hybrid():
    """A Transformer of four layers, and the same with two of them replaced."""
    model = zoo.models.Transformer(vocab=32, embed=16, layers=4, heads=4, kv_heads=2, mlp=16, qk_norm=True, key=KEY)
    return model, replace_mixers(model, {layer: copy_of(layer) for layer in (0, 2)})


def test_replaced_mixers_keep_names_and_patterns(hybrid):
    """Layers 0 and 2 of four: a pattern of two blocks, twice. All other parameters are the model's own."""
    model, other = hybrid
    assert [(len(segment.blocks), segment.num_repeats) for segment in other.stack.segments] == [(2, 2)]
    assert [type(block.mixer) for block in other.stack.iter_blocks()] == 2 * [GatedDeltaNet, Attention]
    names = [{path.name for path in list_parameter_paths(tree)} for tree in (model, other)]
    assert names[0] < names[1] and all("gated_delta_net" in name for name in names[1] - names[0])
    blocks = [list(tree.stack.iter_blocks()) for tree in (model, other)]
    for layer, (before, after) in enumerate(zip(*blocks, strict=True)):
        with_mixer = eqx.tree_at(lambda block: block.mixer, before, copy_of(layer)(before.mixer))
        assert eqx.tree_equal(after, with_mixer if layer in (0, 2) else before)
    mixers = [zoo.count(block.mixer) for block in (blocks[0][0], blocks[1][0])]
    assert zoo.count(other) - zoo.count(model) == 2 * (mixers[1] - mixers[0])
    whole = replace_mixers(other, {layer: copy_of(layer) for layer in (1, 3)})
    assert [(len(segment.blocks), segment.num_repeats) for segment in whole.stack.segments] == [(1, 4)]
    assert zoo.inspect.state_bytes(whole, 64) == zoo.inspect.state_bytes(whole, 4096)


def test_a_model_with_replaced_mixers_decodes(hybrid):
    _, model = hybrid
    tokens = jnp.arange(12).reshape(2, 6)
    new = zoo.generate(model, tokens, max_new_tokens=5)
    logits = model(jnp.concatenate([tokens, new], 1))
    np.testing.assert_array_equal(logits[:, 5:-1].argmax(-1), new)


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"context": 2, "tensor": 2}], ids=str)
def test_replaced_mixers_train_on_a_mesh(hybrid, sizes):
    """Loss and gradient are those of one device; the model was placed before its mixers were replaced."""
    model, serial = hybrid
    mesh = zoo.make_mesh(data=2, **sizes)
    placed = zoo.place(replace_mixers(zoo.place(model, mesh), {layer: copy_of(layer) for layer in (0, 2)}), mesh)
    tokens = jax.random.randint(KEY, (4, 17), 0, 32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    loss, grads = zoo.value_and_grad(zoo.cross_entropy, mesh)(placed, zoo.place_batch(batch, mesh))
    one = zoo.make_mesh(devices=jax.devices()[:1])
    expected, expected_grads = zoo.value_and_grad(zoo.cross_entropy, one)(serial, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for actual, grad in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(actual, grad, atol=2e-5 * max(np.abs(grad).max(), 1e-2))


def test_mixers_that_cannot_be_replaced_are_refused():
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=16, key=KEY)
    with pytest.raises(ValueError, match="there is no layer 2: the model has layers 0 to 1"):
        replace_mixers(model, {2: copy_of(2)})
    with pytest.raises(TypeError, match="expected a mixer for layer 1, got Linear"):
        replace_mixers(model, {1: lambda mixer: mixer.query})
    feed_forward = build_decoder(
        vocab=32,
        embed=16,
        layers=[(None, partial(GatedMLP, 16, 16))],
        tied=True,
        norm=partial(RMSNorm, 16),
        key=KEY,
    )
    with pytest.raises(TypeError, match="layer 0 is a FeedForwardBlock, which has no mixer"):
        replace_mixers(feed_forward, {0: copy_of(0)})
