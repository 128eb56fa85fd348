"""Packed images: places, blocks and windows of patches, by loops over images, steps, rows and columns."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.layers.encoders.packed_embedding import PackedImageEmbedding
from zoo.layers.encoders.packed_images import PackedImages
from zoo.ops.resize import corner_weights

GRIDS = np.array([[[2, 4, 6], [1, 2, 8], [0, 0, 0]], [[1, 6, 2], [1, 2, 2], [3, 4, 4]]])
PATCHES = 90


def make():
    return PackedImages(jnp.zeros((2, PATCHES, 1)), jnp.asarray(GRIDS, jnp.int32))


def walk(row):
    """Yield image, step, row and column of each patch, row by row."""
    for image, grid in enumerate(GRIDS[row]):
        for place in itertools.product(*map(range, grid)):
            yield (image, *place)


def sort_blocks(patches, block):
    """Sort patches to blocks, one after the other, and row by row within each."""
    return sorted(patches, key=lambda x: (x[0], x[1], x[2] // block, x[3] // block, x[2], x[3]))


@pytest.mark.parametrize("block", [1, 2])
def test_places_of_patches(block):
    places = jax.jit(lambda images: images.locate(block))(make())
    for row in range(2):
        wanted = sort_blocks(walk(row), block)
        numbers = np.unique([x[:2] for x in wanted], axis=0, return_inverse=True)[1]
        count = len(wanted)
        assert [x[2:] for x in wanted] == list(zip(places.row[row, :count], places.column[row, :count], strict=True))
        shapes = [tuple(GRIDS[row, x[0], 1:]) for x in wanted]
        assert shapes == list(zip(places.rows[row, :count], places.columns[row, :count], strict=True))
        assert np.array_equal(np.unique(places.segments[row, :count], return_inverse=True)[1], numbers)
        assert not places.segments[row, count:].any() and places.segments[row, :count].all()


@pytest.mark.parametrize("block", [2, 3])
def test_blocks_of_patches(block):
    blocks = jax.jit(lambda images: images.find_blocks(block))(make())
    assert blocks.shape == (2, PATCHES // block**2, block**2) and 0 <= blocks.min() <= blocks.max() < PATCHES
    for row in range(2):
        index = {place: i for i, place in enumerate(walk(row))}
        kept = [x for x in index if all(x[i] < GRIDS[row, x[0], i - 1] // block * block for i in (2, 3))]
        wanted = np.array([index[x] for x in sort_blocks(kept, block)]).reshape(-1, block**2)
        np.testing.assert_array_equal(blocks[row, : len(wanted)], wanted)


def test_windows_of_patches():
    embedding = PackedImageEmbedding(1, 1, merge=2, window=4, key=jax.random.key(0))
    images = make()
    segments, windows = embedding.find_segments(images)
    order = embedding._find_order(images)
    assert windows is not None and order is not None
    for row in range(2):
        patches = sort_blocks(walk(row), 2)
        wanted = sorted(patches, key=lambda x: (*x[:2], x[2] // 4, x[3] // 4))
        count = len(wanted)
        coordinates = embedding.compute_coordinates(images)[row, :count]
        np.testing.assert_array_equal(coordinates, [x[2:] for x in wanted])
        for ids, keys in ((segments, [x[:2] for x in wanted]), (windows, [(*x[:2], *divmod_all(x)) for x in wanted])):
            assert (
                len({*zip(ids[row, :count].tolist(), keys, strict=True)})
                == len({*keys})
                == len({*ids[row].tolist()} - {0})
            )
            assert (np.diff(ids[row, :count]) >= 0).all() and not ids[row, count:].any()
    numbers = jnp.arange(PATCHES, dtype=jnp.float32)[None, :, None].repeat(2, 0)
    moved = jnp.take_along_axis(numbers, order[..., None], axis=1)
    np.testing.assert_array_equal(embedding.restore(moved, images), numbers)


def divmod_all(place):
    return place[2] // 4, place[3] // 4


def test_a_window_has_whole_blocks():
    with pytest.raises(ValueError, match="a window of 5 patches has whole blocks of merge=2"):
        PackedImageEmbedding(1, 1, merge=2, window=5, key=jax.random.key(0))


def test_corner_weights_are_numpys_interpolation():
    for size in (1, 3, 7):
        wanted = [np.interp(np.linspace(0, 3, size), np.arange(4), row) for row in np.eye(4)]
        ours = corner_weights(4, jnp.full(size, size), jnp.arange(size))
        np.testing.assert_allclose(ours, np.stack(wanted, -1), atol=1e-6)
