"""Places of images in a text, by loops over its tokens: positions on three axes, and spans."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.layers import TokenInfo
from zoo.layers.encoders.packed_images import PackedImages
from zoo.models.image_places import CausalPlaces, GridPlaces, ImageSpans, PrefixSpan

GRIDS = [[(1, 4, 6), (1, 2, 2), (1, 2, 8)], [(3, 2, 4), (0, 0, 0), (0, 0, 0)], [(0, 0, 0)] * 3]
SECONDS = [[1.0, 1.0, 1.0], [1.3, 0.0, 0.0], [0.0, 0.0, 0.0]]
TEXTS = ["..iiiiii.i.iiii..", "___.iiiiii.......", "_______.........."]
"""Image tokens, texts and padding. The first row begins its third image after a single token."""


def walk(text, grids, seconds, merge, steps_per_second):
    """Return the place of each token, None for padding."""
    places, images, position = [], [], 0
    for (steps, rows, columns), second in zip(grids, seconds, strict=True):
        shape = (steps, rows // merge, columns // merge)
        rate = 1 if steps_per_second is None else second * steps_per_second
        images += [(place, rate, max(shape[1:]), place == tuple(x - 1 for x in shape)) for place in np.ndindex(*shape)]
    for token in text:
        if token == "i":
            (step, row, column), rate, size, is_last = images.pop(0)
            places.append((position + int(step * rate), position + row, position + column))
            position += size if is_last else 0
        else:
            places.append((position,) * 3 if token == "." else None)
            position += token == "."
    assert not images
    return places


@pytest.mark.parametrize("steps_per_second", [None, 2.0])
def test_grids_are_counted_after_the_text_before_them(steps_per_second):
    tokens = np.array([list(text) for text in TEXTS])
    images = PackedImages(jnp.zeros((3, 48, 1)), jnp.array(GRIDS), jnp.array(SECONDS))
    info = TokenInfo(jnp.where(tokens == "_", -1, np.cumsum(tokens != "_", axis=1) - 1))
    describe = jax.jit(GridPlaces(2, steps_per_second).describe)
    found = describe(jnp.zeros(tokens.shape, int), jnp.asarray(tokens == "i"), images, info, None)
    for row, text in enumerate(TEXTS):
        for place, wanted in enumerate(walk(text, GRIDS[row], SECONDS[row], 2, steps_per_second)):
            assert wanted is None or tuple(found.coordinates[row, place].tolist()) == wanted, (row, place)
    assert found.lookahead is None
    one = PackedImages(images.pixels, images.grids)  # seconds are 1
    evenly = describe(jnp.zeros(tokens.shape, int), jnp.asarray(tokens == "i"), one, info, None)
    np.testing.assert_array_equal(evenly.coordinates[0], found.coordinates[0])
    without = describe(jnp.zeros(tokens.shape, int), jnp.zeros(tokens.shape, bool), None, info, None)
    assert without.coordinates is None, "a text by itself has the positions of its tokens"


def test_spans_of_each_rule():
    is_image = jnp.array([[0, 1, 1, 0, 0]], bool)
    tokens = jnp.zeros((1, 5), int)
    given = jnp.array([[0, 0, 0, 2, 2]])
    padded = TokenInfo(jnp.array([[-1, -1, 0, 1, 2]]))
    rows = {
        CausalPlaces(): (None, None),
        GridPlaces(1): (None, None),
        ImageSpans(): ([0, 1, 0, 0, 0], [0, 1, 0, 0, 0]),
        PrefixSpan(): ([4, 3, 2, 1, 0], [0, 0, 2, 1, 0]),
    }
    for places, wanted in rows.items():
        found = [places.describe(tokens, is_image, None, info, None).lookahead for info in (TokenInfo(), padded)]
        assert tuple(x if x is None else x[0].tolist() for x in found) == wanted, places
        assert places.describe(tokens, is_image, None, padded, given).lookahead.tolist() == [[0, 0, 0, 1, 0]]
        assert places.reads_ahead == (wanted[0] is not None)
        kept = dataclasses.replace(places.describe(tokens, is_image, None, padded, None), lookahead=None)
        assert kept.positions is padded.positions
