"""Images with masks: places of patches on a grid that is not square, by loops over them."""

import jax
import jax.numpy as jnp
import numpy as np

from zoo.layers.encoders.masked_images import MaskedImageEmbedding, MaskedImages

SIDES = (3, 5)
REAL = [(8, 10), (3, 9), (1, 1), (0, 0)]
"""Rows and columns of pixels of each image; a patch has 2 x 2, and the last row of patches may be cut."""


def test_patches_that_count_share_out_the_grid():
    embedding = MaskedImageEmbedding(3, 1, patch_size=(2, 2), grid=SIDES, key=jax.random.key(0))
    embedding = jax.tree.map(jnp.zeros_like, embedding)
    weight = jnp.arange(15.0)[:, None]
    embedding = jax.tree.map(lambda x: weight if x.shape == weight.shape else x, embedding)
    mask = np.zeros((len(REAL), 1, 9, 10), bool)
    for image, (height, width) in zip(mask[:, 0], REAL, strict=True):
        image[:height, :width] = True
    images = MaskedImages(jnp.zeros((len(REAL), 1, 3, 9, 10)), jnp.asarray(mask))
    number, positions = jax.jit(lambda images: (embedding(images), embedding.find_positions(images)))(images)
    for row, (height, width) in enumerate(REAL):
        rows, columns = -(-height // 2), -(-width // 2)
        wanted = np.full((4, 5), -1)
        for y in range(rows):
            for x in range(columns):
                wanted[y, x] = y * SIDES[0] // rows * SIDES[1] + x * SIDES[1] // columns
        np.testing.assert_array_equal(positions[row], np.where(wanted < 0, -1, 0).reshape(-1))
        np.testing.assert_array_equal(number[row, :, 0], np.maximum(wanted, 0).reshape(-1))
