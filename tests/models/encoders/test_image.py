"""Vision Transformers: meshes equal one device, in training with dropout; masks, sizes, and natural mistakes."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import MLP, LayerNorm
from zoo.layers.encoders.bidirectional_attention import BidirectionalAttention
from zoo.layers.encoders.patches import ImageEmbedding
from zoo.layers.encoders.pooling import AttentionPooler
from zoo.models import build_image_encoder, classification_loss
from zoo.models.blocks import LayerScaleBlock
from zoo.models.encoders.heads import ClassificationHead, FeatureHead
from zoo.models.parameter_paths import list_parameter_paths
from zoo.ops.axial_rotary import AxialRotary

KEY, DATA_KEY, DROP_KEY = jax.random.split(jax.random.key(0), 3)
IMAGES = jax.random.normal(DATA_KEY, (8, 3, 8, 12))
EMBED, HEADS = 16, 4


def make(head, *, layers=2, **options):
    """Registers, a mask token, axial RoPE and layer scale."""
    mixer = partial(BidirectionalAttention, EMBED, HEADS, rotary=AxialRotary(EMBED // HEADS), bias=True)
    norm, scale = partial(LayerNorm, EMBED), 0.5 + jnp.arange(EMBED) / EMBED
    return build_image_encoder(
        embedding=partial(ImageEmbedding, 3, EMBED, patch_size=(4, 4), registers=1, mask_token=True),
        layers=[(mixer, partial(MLP, EMBED, 32))] * layers,
        norm=norm,
        head=head,
        block=lambda **parts: LayerScaleBlock(mixer_scale=scale, ffn_scale=scale, **parts),
        key=KEY,
        **options,
    )


def make_features(**options):
    pooler = partial(AttentionPooler, EMBED, HEADS, 32, norm=partial(LayerNorm, EMBED))
    return make(lambda key: FeatureHead(pooler(key=key)), **options)


def loss_fn(model, batch, key=None):
    features = model(batch["images"], masked=batch["masked"], key=key)
    total = jnp.sin(3 * features.last_hidden_state).sum() + jnp.square(features.pooler_output).sum()
    return total, len(batch["images"])


@pytest.mark.slow  # weights/test_families_on_meshes.py has one
def test_image_encoder_on_meshes_equals_one_device():
    batch = {"images": IMAGES, "masked": jnp.arange(48).reshape(8, 6) % 4 == 0}
    model = make_features(dropout=0.2, remat="dots")
    one, many = (zoo.make_mesh(devices=jax.devices()[:1]), zoo.make_mesh(data=2, fsdp=2, tensor=2))
    results = [
        zoo.value_and_grad(loss_fn, mesh)(zoo.place(model, mesh), zoo.place_batch(batch, mesh), key=DROP_KEY)
        for mesh in (one, many)
    ]
    (loss, grads), (sharded_loss, sharded_grads) = jax.device_get(results)
    np.testing.assert_allclose(sharded_loss, loss, rtol=1e-5)
    difference = jax.tree.map(jnp.subtract, sharded_grads, grads)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(grads))
    assert max(np.abs(x).max() for x in jax.tree.leaves(difference)) < 1e-5 * largest
    names = [path.name for path in list_parameter_paths(grads)]
    unused = {name for name, x in zip(names, jax.tree.leaves(grads), strict=True) if np.abs(x).max() < 1e-6 * largest}
    assert all(name.endswith("key.bias") for name in unused)  # which adds one number to all scores of a query


def test_classification_loss_ignores_negative_labels():
    model = eqx.filter_jit(make)(partial(ClassificationHead, EMBED, 5), layers=1)
    labels = jnp.array([0, 4, -1, 2, 2, -1, 1, 3])

    @eqx.filter_jit
    def run(model):
        return model(IMAGES), classification_loss(model, {"images": IMAGES, "labels": labels})

    logits, (total, count) = jax.device_get(run(model))
    known = np.asarray(labels) >= 0
    log_z = np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(total, (log_z - logits[np.arange(8), labels])[known].sum(), rtol=1e-5)
    assert logits.shape == (8, 5) and count == known.sum()


@pytest.mark.parametrize(
    ("run", "error", "message"),
    {
        "integers": (
            lambda model: model(IMAGES.astype(jnp.uint8)),
            TypeError,
            "expected normalized pixels in floating point",
        ),
        "one image": (lambda model: model(IMAGES[0]), ValueError, "a batch of one"),
        "features": (
            lambda model: classification_loss(model, {"images": IMAGES, "labels": jnp.zeros(8, int)}),
            TypeError,
            "needs a ClassificationHead",
        ),
        "no labels": (
            lambda model: classification_loss(model, {"images": IMAGES}),
            ValueError,
            "the batch has no labels, only images",
        ),
    }.values(),
)
def test_image_encoder_refuses_natural_mistakes(no_type_checks, run, error, message):
    with pytest.raises(error, match=message):
        eqx.filter_eval_shape(lambda: run(make_features(layers=1)))
