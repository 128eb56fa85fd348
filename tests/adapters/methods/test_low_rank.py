"""Dropout of low-rank adapters: each has its own mask, the same on one device and on a mesh."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters
from zoo.layers import TokenInfo
from zoo.models.decoder import set_dropout_keys

KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (8, 6), 0, 32)
BATCH = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, 1)}


def test_adapters_of_a_block_draw_masks_of_their_own():
    """The second adapter is around a third one."""
    linear = zoo.layers.Linear(8, 8, key=KEY)
    adapt = lambda base: adapters.LoRA(base, max_rank=2, rank=2, scale=1.0, dropout=0.5, key=KEY)
    info = TokenInfo(keys=jax.random.split(KEY, 2))
    first, second = set_dropout_keys((adapt(linear), adapt(adapt(linear))), info)
    masks = [np.asarray(adapter.drop_inputs(jnp.ones((2, 16, 8)))) for adapter in (first, second, second.base)]
    for mask, other in itertools.combinations(masks, 2):
        assert set(np.unique(mask)) == {0, 2}
        assert 0.3 < (mask == other).mean() < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_lora_dropout_on_a_mesh_matches_one_device(method):
    """The mask depends only on the row's key and the position of the value; without a key there is no dropout."""
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, tied=False, key=KEY)
    options = {"targets": ("query", "down"), "modules_to_save": ("head", "norm"), "rank": 2, "dropout": 0.4}
    wrapped = perturb(getattr(adapters, method)(model, **options, key=KEY))

    def loss_fn(model, batch, key=None):
        return zoo.cross_entropy(model, batch, key=key)

    one_device, mesh = zoo.make_mesh(devices=jax.devices()[:1]), zoo.make_mesh(data=2, fsdp=2, tensor=2)
    run = lambda mesh, key: zoo.value_and_grad(loss_fn, mesh)(
        zoo.place(wrapped, mesh), zoo.place_batch(BATCH, mesh), key=key
    )
    (loss, ours), (on_mesh, theirs) = run(one_device, KEY), run(mesh, KEY)
    np.testing.assert_allclose(on_mesh, loss, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(y, x, atol=5e-5 * max(1e-3, float(jnp.abs(x).max())))
    other_loss, deterministic_loss = run(one_device, jax.random.key(7))[0], run(one_device, None)[0]
    assert abs(float(loss - other_loss)) > 1e-4 and abs(float(loss - deterministic_loss)) > 1e-4
