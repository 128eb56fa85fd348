"""Pictures of attention: a cell for each probability, in its place, with the letters where they fit."""

import base64
import io
import xml.etree.ElementTree as ET

import matplotlib.image
import numpy as np
import pytest

from zoo.tools.draw import draw_attention

SVG = "{http://www.w3.org/2000/svg}"


def make_heads(count, size):
    probabilities = np.random.default_rng(0).dirichlet(np.full(size, 0.2), (count, size))
    return probabilities.astype(np.float32)


def read_images(picture):
    """Return place, size and opacity of the cells of each square; the legend has an image of its own."""
    found = []
    for image in picture.iter(f"{SVG}image"):
        data = image.get("href").partition(",")[2]
        cells = matplotlib.image.imread(io.BytesIO(base64.b64decode(data)))[..., 3]
        if cells.shape[0] == cells.shape[1]:
            found.append((image.get("transform", ""), cells))
    return found


@pytest.mark.parametrize(("width", "columns"), [(860, 4), (360, 2)])
def test_opacity_is_the_root_of_the_probability(width, columns):
    heads = make_heads(5, 7)
    picture = ET.fromstring(draw_attention(heads, list("abcde"), width=width, columns=columns))
    assert picture.get("viewBox").startswith(f"0 0 {width} ")
    images = read_images(picture)
    assert len({place for place, _ in images}) == len(images) == 5
    for head, (_, cells) in zip(heads, images, strict=True):
        assert cells.shape == (7, 7)
        np.testing.assert_allclose(cells, head**0.5, atol=1 / 128)
    assert set("abcde") <= {x.text for x in picture.iter(f"{SVG}text")}


def test_tokens_are_written_where_they_fit():
    heads = make_heads(2, 7)

    def list_tokens(width):
        picture = ET.fromstring(draw_attention(heads, ["one", "<two>"], list("tuvwxy&"), width=width, columns=2))
        return [x.text for x in picture.iter(f"{SVG}text") if len(x.text) == 1 and not x.text.isdigit()]

    assert sorted(list_tokens(400)) == sorted(4 * list("tuvwxy&"))
    assert list_tokens(140) == []


def test_wrong_titles_and_tokens_raise():
    heads = make_heads(2, 7)
    with pytest.raises(ValueError, match="2 heads of 7 queries and 7 keys have 1 titles"):
        draw_attention(heads, ["a"])
    with pytest.raises(ValueError, match="and 3 tokens"):
        draw_attention(heads, ["a", "b"], list("xyz"))
