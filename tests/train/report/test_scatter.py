"""Scatter plots: logarithmic positions, markers like the legend's, inside a report."""

import math
import xml.etree.ElementTree as ET
from functools import partial

import pytest

from zoo.train import ScatterSeries, draw_scatter, group_series, write_report
from zoo.train.report.scatter import MARKER_SHAPES

GROUPS = [ScatterSeries("attention", [1024, 4096], [0.5, 1.0]), ScatterSeries("a <small> state", [2048], [0.25])]


def drawn(groups, **options):
    return ET.fromstring(draw_scatter(groups, unit="accuracy", x_label="bytes of state", **options))


def places(picture):
    """Of the points that say what they are: x and y where the path begins, by what is said."""
    marks = [path for path in picture.iter("path") if path.find("title") is not None]
    return {mark.find("title").text: [float(x) for x in mark.get("d")[1:].split("a")[0].split(",")] for mark in marks}


@pytest.mark.parametrize("size", [{}, {"width": 400, "height": 320}])
def test_scatter_x_axis_is_logarithmic(size):
    picture = drawn(GROUPS, **size)
    at = places(picture)
    first, second, other = (at[f"{label}"] for label in (
        "attention: 0.5 at 1,024", "attention: 1 at 4,096", "a <small> state: 0.25 at 2,048"
    ))  # fmt: skip
    assert other[0] == pytest.approx((first[0] + second[0]) / 2, abs=0.1)
    assert first[1] - second[1] == pytest.approx(2 * (other[1] - first[1]), abs=0.2)
    words = [text.text for text in picture.iter("text")]
    assert {"1Ki", "2Ki", "4Ki", "accuracy", "bytes of state", "attention", "a <small> state"} <= set(words)
    lines = [path.get("class") for path in picture.iter("path") if path.get("class").startswith("line")]
    assert lines == ["line curve0"], "a group of one point has no line"


def test_group_series_keeps_the_order_of_rows():
    rows = [
        {"method": method, "parameters": 8 * rank, "loss": 1 / rank} for rank in (2, 1) for method in ("lora", "dora")
    ]
    halves = [16, 8], [0.5, 1.0]
    expected = [ScatterSeries("lora", *halves), ScatterSeries("dora", *halves)]
    assert group_series(rows, "method", x="parameters", values="loss") == expected


def test_scatter_skips_nonfinite_and_refuses_nonpositive():
    assert len(places(drawn([ScatterSeries("x", [1, 2, 4], [1.0, math.nan, 0.0])]))) == 2
    assert "Nothing was measured" in draw_scatter([ScatterSeries("x", [1], [math.nan])], unit="y", x_label="x")
    with pytest.raises(ValueError, match="bytes: a logarithmic axis takes positive numbers only"):
        draw_scatter([ScatterSeries("x", [0], [1.0])], unit="y", x_label="bytes")


def test_scatter_varies_shapes_beyond_eight_series():
    picture = drawn([ScatterSeries(str(number), [2**number], [1.0]) for number in range(10)])
    marks = [path for path in picture.iter("path") if path.find("title") is not None]
    assert (
        marks[0].get("class") == marks[8].get("class") and "h9" in marks[8].get("d") and "h9" not in marks[0].get("d")
    )
    assert len(MARKER_SHAPES) == 3


def test_scatter_in_a_report_without_curves(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    picture = partial(draw_scatter, GROUPS, unit="accuracy", x_label="bytes of state")
    path = write_report(
        tmp_path, title="Recall", summary="", curves={}, unit="accuracy", plots={"Accuracy & memory": picture}
    )
    page = path.read_text()
    assert "<h2>Accuracy &amp; memory</h2>" in page and page.count("<svg") == 2 and "No metrics" not in page
