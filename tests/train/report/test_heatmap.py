"""Heatmaps: every row in the color of its level, for any counts and widths."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.train.report.heatmap import LEVELS, Heatmap, draw_heatmaps
from zoo.train.report.style import STYLE


def drawn(counts, width=860, **options) -> ET.Element:
    counts = np.asarray(counts, float)
    at = range(10, 10 + len(counts))
    return ET.fromstring(draw_heatmaps([Heatmap("a run", at, counts)], unit="share", width=width, **options))


def rows(picture) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """What each row is called, and of each level the stripes (from, width)."""
    found = {}
    for row in picture.iter("g"):
        stripes = {
            path.get("class"): re.findall(r"M([\d.]+),[\d.]+h([\d.]+)v", path.get("d")) for path in row.iter("path")
        }
        found[row.find("title").text] = {k: [(float(x), float(w)) for x, w in v] for k, v in stripes.items()}
    return found


@pytest.mark.parametrize(
    ("share", "level"),
    [(0, "less3"), (0.3, "less2"), (0.6, "less1"), (1, "even"), (1.5, "more1"), (2.5, "more2"), (5, "more3")],
)
def test_heatmap_colors_rows_by_their_load(share, level):
    """Of eight rows one has this share, the others have equal parts of the rest."""
    counts = np.full((1, 1, 8), (8 - share) / 7)
    counts[0, 0, 2] = share
    (stripes,) = (x for name, x in rows(drawn(100 * counts)).items() if name.startswith("a run, layer 1, expert 3: "))
    assert list(stripes) == ([] if level == "even" else [level])


def test_heatmap_colors_follow_changes_in_load():
    counts = np.ones((4, 1, 2))
    counts[2:, 0] = (0.1, 1.9)
    picture = drawn(counts)
    first, second = rows(picture).values()
    assert list(first) == ["less3"] and list(second) == ["more1"]
    ((x, width),) = second["more1"]  # two columns in one piece, which begins where the second column ends
    left, right = 70, 860 - 14
    assert x == pytest.approx(left + (right - left) * 11 / 13, abs=0.1)
    assert x + width == pytest.approx(right, abs=0.1)


def test_heatmap_normalizes_each_group_and_idle_is_even():
    names = list(rows(drawn([[[1, 3], [100, 300], [0, 0]]])))
    shares = [name.split(": ")[1] for name in names]
    assert shares == [f"{x} in the end" for x in ("0.50", "1.50", "0.50", "1.50", "1.00", "1.00")]


def test_heatmap_shows_some_of_many_groups():
    labels = [x.text for x in drawn(np.ones((2, 48, 4)), group="block").iter("text") if x.text.startswith("block")]
    assert len(labels) == 8 and labels[0] == "block 1" and labels[-1] == "block 48"


def test_heatmap_of_a_long_run_stays_small():
    counts = np.random.default_rng(0).uniform(size=(3000, 1, 4))
    wide, narrow = drawn(counts), drawn(counts, width=400)
    assert all(len(x) <= 100 for row in rows(wide).values() for x in row.values())
    assert float(narrow.get("viewBox").split()[2]) == 400 and "in the end" in narrow.get("aria-label")


def test_heatmap_classes_are_in_the_style_sheet():
    assert 'class^="less"' in STYLE and 'class^="more"' in STYLE and ".chart .even" in STYLE
    assert {name.rstrip("0123456789") for name in LEVELS} == {"less", "even", "more"}


def test_heatmap_without_metrics_says_so():
    assert draw_heatmaps([], unit="share") == "<p>No metrics were logged.</p>"


@given(
    st.lists(st.lists(st.floats(0, 1e9), min_size=6, max_size=6), min_size=1, max_size=12), st.sampled_from([300, 860])
)
def test_heatmap_of_any_counts_is_well_formed(values, width):
    picture = drawn(np.asarray(values).reshape(-1, 2, 3), width=width)
    assert picture.tag == "svg" and len(rows(picture)) == 6 and "nan" not in ET.tostring(picture, "unicode")
