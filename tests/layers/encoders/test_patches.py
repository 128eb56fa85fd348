"""Embedding of images: the convolution that it is, positions of other sizes, masks, and natural mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.layers.encoders.patches import ImageEmbedding, PatchEmbedding

KEY, OTHER_KEY = jax.random.split(jax.random.key(0))
IMAGES = jax.random.normal(OTHER_KEY, (2, 3, 9, 7))


def make(**options):
    return ImageEmbedding(3, 8, patch_size=(4, 2), key=KEY, **options)


def test_patch_embedding_is_a_strided_convolution():
    layer = PatchEmbedding(3, 8, (4, 2), key=KEY)
    wanted = jax.lax.conv_general_dilated(IMAGES, layer.weight, (4, 2), "VALID")  # the last row and column are left out
    np.testing.assert_allclose(layer(IMAGES), wanted.reshape(2, 8, -1).swapaxes(1, 2), atol=1e-5)


def test_image_embedding_joins_tokens_and_positions():
    embedding = make(grid=(2, 3))
    x, patches = embedding(IMAGES), embedding.patches(IMAGES)
    np.testing.assert_array_equal(x[0, 0], embedding.class_token + embedding.positions.weight[0])
    np.testing.assert_array_equal(x[:, 1:], patches + embedding.positions.weight[1:])
    larger = embedding(jnp.ones((1, 3, 12, 6)))
    assert larger.shape == (1, 1 + 3 * 3, 8)
    np.testing.assert_array_equal(larger[0, 0], x[0, 0])  # the class token's position is not interpolated

    registers = make(registers=2)
    assert registers(IMAGES).shape == (2, 1 + 2 + 6, 8)
    coordinates = registers.compute_coordinates(IMAGES)
    np.testing.assert_array_equal(coordinates[:, :3], 0)
    assert coordinates.shape == (2, 9, 2) and np.abs(coordinates[:, 3:]).min(axis=(0, 1)).max() > 0


def test_masked_patches_are_the_mask_token():
    embedding, masked = make(mask_token=True, class_token=False), np.arange(12).reshape(2, 6) % 5 == 0
    x = embedding(IMAGES, jnp.asarray(masked))
    np.testing.assert_array_equal(x[masked], 0)
    np.testing.assert_array_equal(x[~masked], embedding(IMAGES)[~masked])


@pytest.mark.parametrize(
    "call, message",
    {
        "channels last": (lambda: make()(IMAGES.transpose(0, 2, 3, 1)), "channels come before height and width"),
        "too small": (lambda: make()(IMAGES[:, :, :3]), "3 x 7 pixels is smaller than a patch of 4 x 2"),
        "no mask token": (lambda: make()(IMAGES, jnp.zeros((2, 6), bool)), "which this model does not have"),
        "registers and positions": (lambda: make(grid=(2, 3), registers=1), "registers have no learned positions"),
    }.values(),
)
def test_image_embedding_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()
