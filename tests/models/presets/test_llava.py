"""LLaVA from scratch: its parameters, files, the same on a mesh, and natural mistakes."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo

SIZES = {"vocab": 12, "length": 16, "image_token": 11, "image_size": 8, "patch_size": 4, "channels": 1}
SIZES |= {"embed": 16, "layers": 2, "heads": 4, "mlp": 24}
make = partial(zoo.models.LLaVA, **SIZES, key=jax.random.key(0))


def draw(rows=4):
    tokens = jnp.asarray([[11, 11, 11, 11, 1, row, 3, 4] for row in range(rows)])
    return tokens, jax.random.normal(jax.random.key(1), (rows, 1, 1, 8, 8))


def test_llava_is_the_tower_of_clip_and_the_decoder_of_llama():
    model = eqx.filter_eval_shape(make)
    biased = 4 * 16 * 17 + 24 * 17 + 16 * 25 + 4 * 16  # a layer of the tower
    tower = 16 * 16 + 16 + 5 * 16 + 4 * 16 + 2 * biased  # patches, a class token, positions, two norms
    decoder = 2 * 12 * 16 + 16 + 2 * (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16)
    assert zoo.count(model) == tower + 2 * 16 * 17 + decoder
    tokens, images = draw()
    logits = eqx.filter_eval_shape(lambda model, *x: model(*x), model, tokens, images)
    assert logits.shape == (4, 8, 12)


def test_llava_is_saved_as_transformers_writes_it(tmp_path):
    model = make()
    zoo.save(model, tmp_path)
    again = zoo.load(tmp_path)
    assert again.origin.family.name == "llava"
    np.testing.assert_array_equal(again(*draw()), model(*draw()))
    changed = model(draw()[0], draw()[1].at[2].add(1.0))
    rows = np.abs(np.asarray(changed - model(*draw()))).max((1, 2))
    assert rows[2] > 1e-4 and rows[[0, 1, 3]].max() == 0


@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"tensor": 4}])
def test_llava_on_a_mesh_is_llava_on_one_device(axes):
    tokens, images = draw()
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "images": images}
    batch["weights"] = jnp.ones_like(batch["targets"], jnp.float32).at[:, :4].set(0)
    loss, grads = zoo.value_and_grad(zoo.cross_entropy, zoo.make_mesh(devices=jax.devices()[:1]))(make(), batch)
    mesh = zoo.make_mesh(**axes, devices=jax.devices()[:4])
    placed = zoo.init(lambda key: zoo.models.LLaVA(**SIZES, key=key), jax.random.key(0), mesh)
    other, sharded = zoo.value_and_grad(zoo.cross_entropy, mesh)(placed, zoo.place_batch(batch, mesh))
    np.testing.assert_allclose(other, loss, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_allclose(y, x, atol=1e-5 * max(1, np.abs(x).max()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_token": 12}, "image_token=12 is not one of 12 token ids"),
        ({"patch_size": 9}, "image_size = 8 is smaller than patch_size = 9"),
        ({"heads": 3}, "hidden_size = 16 does not divide evenly over 3 heads"),
        ({"layers": 0}, "num_hidden_layers = 0 should be a whole number above 0"),
    ],
)
def test_llava_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        eqx.filter_eval_shape(lambda: make(**changes))
