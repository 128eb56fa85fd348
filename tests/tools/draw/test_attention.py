"""Pictures of attention: a cell for each probability that is large enough, in its place, and nothing outside."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from zoo.tools.draw import draw_attention
from zoo.tools.draw.attention import _LEVELS

SVG = "{http://www.w3.org/2000/svg}"
each_width = pytest.mark.parametrize(("width", "columns"), [(860, 4), (360, 2), (400, 1)])


def make_heads(count, size):
    probabilities = np.random.default_rng(0).dirichlet(np.full(size, 0.2), (count, size))
    return probabilities.astype(np.float32)


def list_cells(group):
    """Return the opacity of each drawn cell, by query and key."""
    found = {}
    for path in group.iter(f"{SVG}path"):
        for key, query in re.findall(r"M(\d+) (\d+)h1v1h-1z", path.get("d")):
            assert (int(query), int(key)) not in found
            found[int(query), int(key)] = float(path.get("fill-opacity"))
    return found


@each_width
def test_cells_are_the_probabilities(width, columns):
    heads = make_heads(5, 7)
    picture = ET.fromstring(draw_attention(heads, list("abcde"), width=width, columns=columns))
    groups = list(picture.iter(f"{SVG}g"))
    assert len(groups) == 5
    for head, group in zip(heads, groups, strict=True):
        wanted = {}
        for place in np.ndindex(head.shape):
            if levels := [low for low in _LEVELS if head[place] >= low]:
                wanted[place] = _LEVELS[levels[-1]]
        assert list_cells(group) == wanted


@each_width
def test_squares_lie_in_the_picture_and_apart(width, columns):
    picture = ET.fromstring(
        draw_attention(make_heads(5, 7), list("abcde"), list("tuvwxyz"), width=width, columns=columns)
    )
    _, _, wide, high = map(float, picture.get("viewBox").split())
    places = []
    for group in picture.iter(f"{SVG}g"):
        x, y, scale = map(float, re.findall(r"[\d.]+", group.get("transform")))
        assert 0 <= x < x + 7 * scale <= wide == width
        assert 0 <= y < y + 7 * scale <= high
        places.append((x, y))
        assert all(abs(x - u) > 7 * scale or abs(y - v) > 7 * scale for u, v in places[:-1])


def test_tokens_are_written_where_they_fit():
    heads = make_heads(2, 7)

    def list_tokens(width):
        picture = ET.fromstring(draw_attention(heads, ["a", "<b>"], list("tuvwxy&"), width=width, columns=2))
        return [x.text for x in picture.iter(f"{SVG}text") if x.get("class") == "token"]

    assert sorted(list_tokens(400)) == sorted(4 * list("tuvwxy&"))
    assert list_tokens(120) == []


def test_wrong_titles_and_tokens_raise():
    heads = make_heads(2, 7)
    with pytest.raises(ValueError, match="2 heads of 7 queries and 7 keys have 1 titles"):
        draw_attention(heads, ["a"])
    with pytest.raises(ValueError, match="and 3 tokens"):
        draw_attention(heads, ["a", "b"], list("xyz"))
