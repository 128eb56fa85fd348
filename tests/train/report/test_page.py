"""Reports: one well-formed file without external resources, with the run's numbers."""

import json
import re
import xml.etree.ElementTree as ET

import equinox as eqx
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from zoo.train import ParameterRow, tabulate_parameters, write_report
from zoo.train.report.chart import Curve, choose_log_ticks, choose_ticks, draw_line_chart, smooth_values
from zoo.train.report.page import _escape


@pytest.fixture
def run(tmp_path):
    """A folder as a run of 100 steps leaves it, stopped once and resumed."""
    lines = [dict(step=step, bits_per_byte=8.0 / step + 2) for step in range(1, 101)]
    lines[4]["bits_per_byte"] = "nan"
    lines[49]["validation"], lines[99]["validation"] = 2.5, 2.25
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    timing = [dict(step=10, seconds=5.0)]
    timing += [dict(step=10 * i, seconds=5.0 + i, tokens_per_second=1000.0 * i) for i in range(2, 6)]
    timing += [dict(step=60, seconds=4.0), dict(step=100, seconds=9.0, tokens_per_second=3500.0)]
    (tmp_path / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timing))
    (tmp_path / "config.json").write_text(json.dumps({"embed": 64, "data": [], "name": "<script>"}))
    (tmp_path / "env.json").write_text(json.dumps({"devices": {"cpu": 8}, "commit": None}))
    return tmp_path


def write(run, **more) -> str:
    path = write_report(
        run,
        title="A <small> model",
        summary="2.25 bits per byte & falling",
        curves={"bits_per_byte": "train", "validation": "validation"},
        unit="bits per byte",
        baselines={"xz -9e": 1.75},
        samples=[("def <f>(", "x):\n\treturn \x01\x7f \ufffd ✓")],
        parameters=[
            ParameterRow("model.weight", "[64, 32]", "out in", "fsdp, tensor", "float32", 2048, 8192),
            ("model.bias", "[64]", "out", "", "float32", 64, 256),
        ],
        **more,
    )
    assert path == run / "report.html"
    return path.read_text(encoding="utf-8")


def parsed(page: str) -> ET.Element:
    return ET.fromstring(page.removeprefix("<!DOCTYPE html>"))


def test_report_has_no_scripts_or_external_resources(run):
    page = write(run)
    assert not re.search(
        r"https?:|//|src=|href=|url\((?!#)|@import|<script|<link|<img|<iframe", page.replace("</", "<")
    )


def test_report_is_well_formed_and_escaped(run):
    root = parsed(write(run, headline={"bits < 3": "2.25"}))
    text = "".join(root.itertext())
    for wanted in ("A <small> model", "def <f>(", "\u2401\u2421", "<script>", "embed", "cpu 8", "2,112", "bits < 3"):
        assert wanted in text
    rows = root.findall(".//table/tbody/tr[@class='total']/td")
    assert [cell.text for cell in rows if cell.text] == ["total", "2,112", "8,448"]
    assert "time in all" in text and "0:19" in text and "starts" in text


def test_report_draws_curve_and_baseline_in_two_sizes(run):
    root = parsed(write(run))
    charts = root.findall(".//svg")
    assert len(charts) == 2
    for drawn in charts:
        assert len(drawn.findall(".//circle")) == 2 and len(drawn.findall(".//path[@class='floor']")) == 1
        labels = [element.text for element in drawn.iter("text")]
        assert {"train", "validation", "xz -9e 1.750", "steps", "bits per byte"} <= set(labels)
        raw = drawn.find(".//path[@class='raw curve0']")
        assert raw.get("d").count(",") == 99 and "nan" not in raw.get("d")


def test_report_shows_public_names_and_every_digit(tmp_path):
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    sizes = {"vocab": 64, "embed": 16, "layers": 4, "heads": 2, "mlp": 32, "windows": (None, 4)}
    model = eqx.filter_eval_shape(lambda key: zoo.models.Transformer(**sizes, key=key), jax.random.key(0))
    rows = tabulate_parameters(model, mesh)
    assert len({row.name for row in rows}) == len(rows) and rows[0].name == "embedding.weight"
    names = {row.name for row in rows}
    assert names >= {f"layers.*.attention.query.weight ({first}-{first + 2} by 2)" for first in (0, 1)}
    assert not any("segments" in name for name in names)
    assert tabulate_parameters({"a": np.ones(3), "b": np.ones(2)}, mesh)[1].name == "b"
    page = write_report(tmp_path, title="t", summary="s", curves={}, unit="nats", parameters=rows).read_text()
    table = parsed(page).find(".//div[@class='scroll']/table[@class='parameters']")
    cells = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert cells[0] == ["name, dims, layout", "shape", "dtype", "count", "bytes"]
    for row, cell in zip(rows, cells[1:-1], strict=True):
        assert cell[0] == f"{row.name}{row.dims}; {row.layout}" and cell[-2:] == [f"{row.count:,}", f"{row.bytes:,}"]


def test_report_strips_the_blank_ends_of_samples(tmp_path):
    samples = [("def f(", "x):\n    return x\n\n   \n\t"), ("a\n", " \n ")]
    page = write_report(tmp_path, title="t", summary="s", curves={}, unit="nats", samples=samples).read_text()
    assert "<pre><b>def f(</b>x):\n    return x</pre><pre><b>a\n</b></pre>" in page


def draw_optimization(folder, norms, rates) -> list[ET.Element]:
    """Write a report on a run that logged gradient norms and learning rates; return its small charts."""
    lines = [dict(step=i, gradient_norm=x, learning_rate=y) for i, (x, y) in enumerate(zip(norms, rates, strict=True))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(folder, title="t", summary="s", curves={}, unit="nats").read_text()
    return parsed(page).findall(".//section[@class='pair']/div/svg")


def test_report_draws_gradient_norm_and_learning_rate(tmp_path):
    norm, rate = draw_optimization(
        tmp_path, [100.0, 10.0, "nan", 0.1] * 20, [0.0, *(0.002 - i / 4e4 for i in range(79))]
    )
    assert [x.get("aria-label") for x in (norm, rate)] == ["gradient norm against steps", "learning rate against steps"]
    texts = [[element.text for element in x.iter("text")] for x in (norm, rate)]
    assert {"0.1", "1", "10", "100"} <= set(texts[0]), "powers of ten are equally far apart"
    y = {element.text: float(element.get("y")) for element in norm.iter("text")}
    assert y["10"] - y["100"] == pytest.approx(y["1"] - y["10"], abs=0.2)
    assert {"0", "0.001", "0.002"} <= set(texts[1])
    assert not rate.findall(".//circle") and rate.find(".//path[@class='line curve0']").get("d").count(",") == 80


def test_report_draws_gradient_norms_of_a_sweep(tmp_path):
    """The median of its runs; zeros have no logarithm."""
    norm, _ = draw_optimization(tmp_path, [[0.0, 1.0, 5.0], [0.0, 0.0, 1.0]], [[0.0, 0.1, 0.2]] * 2)
    assert [element.text for element in norm.iter("title")] == ["at step 0: 1.0000", "at step 1: 0.0000"]
    assert norm.get("aria-label") == "gradient norm, median against steps"


@given(st.floats(-8, 8), st.floats(1e-3, 9), st.integers(2, 8))
@settings(deadline=None)
def test_log_ticks_are_inside_and_few(low, size, count):
    found = choose_log_ticks(low, low + size, count)
    assert 1 <= len(found) <= count + 2 and list(found) == sorted(found)
    assert all(low - 1e-6 <= y <= low + size + 1e-6 for y in found)
    assert all(float(label) == pytest.approx(10**y, rel=1e-4) for y, label in found.items())


def test_report_omits_empty_sections(tmp_path):
    path = write_report(tmp_path, title="t", summary="s", curves={"loss": "train"}, unit="nats")
    page = path.read_text()
    parsed(page)
    assert "No metrics were logged" in page and "<h2>" not in page


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=80),
    st.sampled_from([True, False]),
    st.sampled_from([{}, {"floor": 1.0}]),
)
@settings(deadline=None, max_examples=60)
def test_line_chart_of_any_values_is_well_formed(values, smooth, floors):
    drawn = ET.fromstring(draw_line_chart([Curve("loss", range(len(values)), values, smooth)], floors, unit="nats"))
    assert drawn.tag in ("svg", "p")


def test_axis_of_few_steps_has_whole_numbers():
    svg = draw_line_chart([Curve("error", range(4), [1.0, 3.0, 2.0, 1.0])], {}, unit="units", x_label="layers")
    axis = re.findall(r">(\d[\d.]*)</text>", svg)
    assert [label for label in axis if label in ("0", "0.5", "1.5", "2", "3")].count("2") <= 2 and "0.5" not in axis
    assert {"0", "1", "2", "3"} <= set(axis)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 12))
@settings(deadline=None)
def test_ticks_are_round_and_inside(low, size, count):
    found = choose_ticks(low, low + size, count)
    assert len(found) <= count + 1
    assert all(low - 1e-6 * size <= tick <= low + size * (1 + 1e-6) for tick in found)


def test_smooth_values_is_bias_corrected():
    np.testing.assert_allclose(smooth_values(np.full(50, 3.0)), 3.0)
    assert smooth_values(np.array([4.0, 2.0]))[0] == 4.0


@given(st.text(max_size=30))
@settings(deadline=None)
def test_report_escapes_any_sample(sample):
    sample = sample.encode(errors="replace").decode().replace("\ufffe", "").replace("\uffff", "")
    ET.fromstring(f"<pre>{_escape(sample)}</pre>")


@pytest.fixture
def two(tmp_path):
    """Two runs that are compared; of one only it is known which way rows went."""
    for name, first in (("a", 3.0), ("b < c", 2.0)):
        folder = tmp_path / name[:1]
        folder.mkdir()
        lines = [
            dict(step=step, loss=first / step) | ({"visits": [[step, 1]]} if name == "a" else {}) for step in (1, 2)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "config.json").write_text(json.dumps({"run": name}))
    return {"a": tmp_path / "a", "b < c": tmp_path / "b"}


def test_report_compares_runs(two, tmp_path):
    rows = [{"run": "a", "count": 1234, "share": 0.5}, {"run": "b < c", "count": 5, "share": "none"}]
    path = write_report(
        tmp_path, title="t", summary="s", curves={"loss": "loss"}, unit="nats", runs=two, tokens_per_step=100,
        tables={"The & end": rows}, heatmaps={"visits": "Loads"},
    )  # fmt: skip
    root = parsed(path.read_text())
    wide, _, heat, _ = root.findall(".//svg")
    labels = [element.text for element in wide.iter("text")]
    assert {"a", "b < c", "tokens"} <= set(labels) and "loss" not in labels
    titles = [element.text for element in wide.iter("title")]
    assert titles == [
        *("a after 100 tokens: 3.0000", "a after 200 tokens: 1.5000"),
        *("b < c after 100 tokens: 2.0000", "b < c after 200 tokens: 1.0000"),
    ]
    assert [row.find("title").text for row in heat.iter("g")] == [
        *("a, layer 1, expert 1: 1.33 in the end", "a, layer 1, expert 2: 0.67 in the end"),
    ]
    cells = [[(cell.text, cell.get("class")) for cell in row] for row in root.find(".//table").iter("tr")]
    assert cells == [
        [("run", None), ("count", "number"), ("share", "number")],
        [("a", None), ("1,234", "number"), ("0.500", "number")],
        [("b < c", None), ("5", "number"), ("none", "number")],
    ]
    assert [element.text for element in root.iter("h2")] == ["The & end", "Loads", "Configuration"]


def test_report_leaves_room_beside_the_legend_of_many_runs(tmp_path):
    names = [f"gated-delta-net-{width}" for width in range(16)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "gradient_norm": 1.0}\n')
    runs = {name: tmp_path / name for name in names}
    page = write_report(tmp_path, title="t", summary="s", curves={}, unit="nats", runs=runs).read_text()
    (norm,) = parsed(page).findall(".//section[@class='pair']/div/svg")
    assert {element.text for element in norm.iter("text")} >= set(names)
    assert float(norm.find(".//rect").get("height")) == 142, "as with a legend of one line"


def test_report_labels_curves_by_run_and_metric(two, tmp_path):
    curves = {"loss": "training", "validation": "validation"}
    page = write_report(tmp_path, title="t", summary="s", curves=curves, unit="nats", runs=two).read_text()
    labels = [element.text for element in parsed(page).iter("text")]
    assert "a, training" in labels and "b < c, training" in labels and "a" not in labels


def test_legend_wraps_long_lines():
    curves = [Curve(f"a label of some length {number}", [0, 1], [1.0, 0.5]) for number in range(6)]
    for width, lines in ((860, 2), (400, 6)):
        root = ET.fromstring(draw_line_chart(curves, {}, unit="nats", width=width))
        found = [element for element in root.iter("text") if element.text.startswith("a label")]
        assert len({element.get("y") for element in found}) == lines
        assert all(0 < float(element.get("x")) < width - 100 for element in found)
        box = root.find(".//rect")
        assert float(box.get("y")) > max(float(element.get("y")) for element in found)


def test_x_axis_abbreviates_large_numbers():
    root = ET.fromstring(draw_line_chart([Curve("loss", [0, 10**12], [1.0, 0.5])], {}, unit="nats", x_label="tokens"))
    assert {"200G", "1T", "tokens"} <= {element.text for element in root.iter("text")}
