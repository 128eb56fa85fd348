"""Charts: well-formed SVG with the values and labels that they were given."""

import base64
import io
import re
import xml.etree.ElementTree as ET

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.textpath import TextPath

from zoo.tools._figure import COLORS
from zoo.tools.report import Curve, ImageGrid, LineChart, Picture, ScatterChart
from zoo.tools.report.charts import smooth_values

SVG = "{http://www.w3.org/2000/svg}"
CHARTS = {
    "lines": LineChart([Curve("a < b", [1, 2, 3], [3.0, 2.0, 1.0])], "nats", baselines={"floor": 0.5}),
    "scatter": ScatterChart([Curve("mixer", [512, 4096], [0.5, 0.75])], "accuracy", "bytes"),
    "images": ImageGrid(np.eye(8)[None].repeat(3, 0), ["1", "2", "3 < 4"], [False, True, False], "digits"),
}


def draw(chart, width=860) -> ET.Element:
    return ET.fromstring(chart.draw_svg(width=width))


def list_texts(chart, width=860) -> list[str]:
    return [element.text for element in draw(chart, width).iter(f"{SVG}text")]


def count_points(path: ET.Element) -> int:
    return len(re.findall("[ML]", path.get("d")))


@pytest.mark.parametrize("name", CHARTS)
@pytest.mark.parametrize("width", [860, 400])
def test_chart_is_drawn_at_a_width(name, width):
    root = draw(CHARTS[name], width)
    assert root.get("viewBox").startswith(f"0 0 {width} ") and root.get("aria-label") == CHARTS[name].description


@pytest.mark.parametrize("width", [300, 430, 860])
@pytest.mark.parametrize("word", ["width-", "mmmmmmmm", "measured, the last held out "])
def test_all_labels_are_inside_the_picture(width, word):
    labels = [f"{word}{number}" for number in range(6)]
    root = draw(LineChart([Curve(label, [1, 2], [3.0, 2.0]) for label in labels], "nats"), width)
    found = {text.text: text for text in root.iter(f"{SVG}text") if text.text in labels}
    assert set(found) == set(labels)
    for label, text in found.items():
        start = float(text.get("x"))
        end = start + TextPath((0, 0), label, size=11).get_extents().width
        assert 30 < start < end < width, "with the line before it"


def test_line_chart_has_labels_unit_and_baseline():
    assert {"a < b", "nats", "steps", "floor 0.500"} <= set(list_texts(CHARTS["lines"]))
    assert draw(CHARTS["lines"]).get("aria-label") == "nats against steps"


@pytest.mark.filterwarnings("error")
def test_line_chart_shows_baselines_above_its_curves():
    """A model may be better than xz; matplotlib shrinks a chart with a label outside of it to nothing."""
    values = list(np.linspace(2.0, 1.2, 200))
    chart = LineChart(
        [Curve("a", range(200), values, smooth=True)], "bits", baselines={"xz": 2.3, "none": float("nan")}
    )
    assert "xz 2.300" in list_texts(chart) and not any("nan" in text for text in list_texts(chart))
    frame = [path for path in draw(chart).iter(f"{SVG}path") if "stroke-dasharray" in path.get("style", "")]
    assert frame, "the line is drawn inside the axes"


def test_labels_are_shown_as_they_are():
    """Neither as formulas, nor hidden for an underscore."""
    texts = list_texts(LineChart([Curve("cost $5 \\foo $6", [1], [1.0]), Curve("_mine", [1], [2.0])], "nats"))
    assert any("cost $5 \\foo $6" in text for text in texts) and any("_mine" in text for text in texts)


def test_picture_was_drawn_elsewhere():
    picture = Picture(lambda width: f"<svg>{width}</svg>")
    assert (picture.draw_svg(width=860), picture.draw_svg(width=400)) == ("<svg>860</svg>", "<svg>400</svg>")


def test_line_chart_thins_long_curves_and_skips_nan():
    noise = np.random.default_rng(0).normal(size=9998)
    values = [float("nan"), *noise, float("inf")]
    chart = LineChart([Curve("a", range(10_000), values, dots=False)], "nats")
    (line,) = [
        path for path in draw(chart).iter(f"{SVG}path") if COLORS[0] in path.get("style", "") and path.get("clip-path")
    ]
    assert 2 <= count_points(line) <= 1000


def test_smoothed_line_lies_within_its_values():
    chart = LineChart([Curve("a", range(200), np.resize([1.0, 3.0], 200), smooth=True)], "nats")
    lines = [path for path in draw(chart).iter(f"{SVG}path") if COLORS[0] in path.get("style", "")]
    values, smoothed = (path for path in lines if path.get("clip-path"))

    def measure_height(path):
        heights = [float(y) for _, y in re.findall(r"[ML] (\S+) (\S+)", path.get("d"))][20:]
        return max(heights) - min(heights)

    assert "opacity" in values.get("style") and "opacity" not in smoothed.get("style")
    assert 0 < measure_height(smoothed) < 0.5 * measure_height(values)


def test_line_chart_without_values_says_so():
    assert "no values were logged" in list_texts(LineChart([Curve("a", [], [])], "nats"))


def test_logarithmic_axis_has_plain_powers_of_ten():
    texts = list_texts(LineChart([Curve("", range(4), [100.0, 10.0, 1.0, 0.1])], "gradient norm", log=True))
    assert {"0.1", "1", "10", "100"} <= set(texts)
    zero = list_texts(LineChart([Curve("", range(2), [0.0, 1.0])], "gradient norm", log=True))
    assert any(float(text) == 0 for text in zero if text[0].isdigit()), "zero has no logarithm"


def test_axis_of_few_steps_has_whole_numbers():
    texts = list_texts(LineChart([Curve("error", range(4), [1.0, 3.0, 2.0, 1.0])], "units", "layers"))
    assert {"0", "1", "2", "3"} <= set(texts) and "0.5" not in texts[:8]


def test_large_counts_have_prefixes():
    assert "1T" in list_texts(LineChart([Curve("loss", [0, 10**12], [1.0, 0.5])], "nats", "tokens"))
    assert {"512", "4Ki"} <= set(list_texts(CHARTS["scatter"]))
    flops = ScatterChart([Curve("a", [2.0**50, 2.0**71], [1.0, 2.0])], "accuracy", "FLOPs")
    assert any(text.endswith("Pi") for text in list_texts(flops)) and any(
        text.endswith("Ei") for text in list_texts(flops)
    )


def test_scatter_of_learning_rates_has_powers_of_two():
    chart = ScatterChart([Curve("adamw", [2**-8, 2**-2], [3.5, 3.0])], "bits per byte", "rate", from_zero=False)
    texts = list_texts(chart)
    assert {"2^-8", "0.25"} <= set(texts)
    assert "3.0" in texts and "0.0" not in texts


def test_scatter_draws_a_curve_without_dots_as_a_line():
    dotted, plain = (
        ScatterChart([Curve("fit", [512, 4096], [0.5, 0.75], dots=dots)], "accuracy", "bytes").draw_svg(width=400)
        for dots in (True, False)
    )
    assert dotted.count("<use ") == plain.count("<use ") + 3  # two values, and one in the legend


def test_scatter_refuses_zero_and_groups_rows():
    with pytest.raises(ValueError, match="bytes: a logarithmic axis takes positive numbers only"):
        ScatterChart([Curve("a", [0, 1], [1.0, 2.0])], "accuracy", "bytes")
    rows = [
        {"m": name, "size": size, "bits": bits} for name, size, bits in (("a", 1, 3.0), ("b", 2, 2.0), ("a", 4, 1.0))
    ]
    chart = ScatterChart.of_rows(rows, "m", x="size", values="bits", unit="bits", x_label="size")
    assert chart.curves == [Curve("a", [1, 4], [3.0, 1.0]), Curve("b", [2], [2.0])]


def test_images_are_as_light_as_their_intensities():
    """And a frame is around the image that was missed, not around the others."""
    root = draw(CHARTS["images"])
    data = [x.get("href").partition(",")[2] for x in root.iter(f"{SVG}image")]
    images = [matplotlib.image.imread(io.BytesIO(base64.b64decode(x))) for x in data]
    assert len(images) == 3
    np.testing.assert_allclose(images[0][..., 0], np.eye(8), atol=1 / 128)
    frames = [x for x in root.iter(f"{SVG}path") if f"stroke: {COLORS[1]}" in x.get("style", "")]
    assert len(frames) == 4, "the sides of one image"


def test_image_grid_refuses_missing_captions():
    with pytest.raises(ValueError, match="3 images, 1 captions and 3 marks: each image has one caption and one mark"):
        ImageGrid(np.zeros((3, 2, 2)), ["1"], [True] * 3, "digits")
    assert {"1", "2", "3 < 4"} <= set(list_texts(CHARTS["images"], 400))


def test_image_grid_of_colors_has_wide_cells_and_several_lines():
    pictures = [np.zeros((4, 6, 3), np.uint8), np.ones((5, 5))]
    grid = ImageGrid(pictures, ["costs $5\nand $6", "2"], [False, True], "pictures", cell=200)
    assert {"costs $5", "and $6", "2"} <= set(list_texts(grid))
    assert (grid.choose_height(860), grid.choose_height(200)) == (236, 472)


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=80),
    st.sampled_from([{"smooth": True}, {}]),
    st.sampled_from([{}, {"floor": 1.0}]),
)
@settings(deadline=None, max_examples=10)
def test_line_chart_of_any_values_is_well_formed(values, options, floors):
    curve = Curve("loss", range(len(values)), values, **options)
    assert draw(LineChart([curve], "nats", baselines=floors)).tag == f"{SVG}svg"


def test_smooth_values_is_bias_corrected():
    np.testing.assert_allclose(smooth_values(np.full(50, 3.0)), 3.0)
    assert smooth_values(np.array([4.0, 2.0]))[0] == 4.0
