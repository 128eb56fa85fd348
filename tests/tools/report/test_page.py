"""Reports: one well-formed file without external resources, with the run's numbers."""

import importlib.util
import json
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo._terminal import escape_controls
from zoo.tools.report import Picture, write_report
from zoo.tools.report.page import ParameterRow, _escape, _make_load_curves


@pytest.fixture
def run(tmp_path):
    """A folder as a run of 100 steps leaves it, stopped once and resumed."""
    lines = [dict(step=step, bits_per_byte=8.0 / step + 2, gradient_norm=1.0) for step in range(1, 101)]
    lines[4]["bits_per_byte"] = "nan"
    lines[49]["validation"] = 2.5
    lines[99]["validation"] = 2.25
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    timing = [dict(step=10, seconds=5.0)]
    timing += [dict(step=10 * i, seconds=5.0 + i, tokens_per_second=1000.0 * i) for i in range(2, 6)]
    timing += [dict(step=60, seconds=4.0), dict(step=100, seconds=9.0, tokens_per_second=3500.0)]
    (tmp_path / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timing))
    (tmp_path / "config.json").write_text(json.dumps({"embed": 64, "data": [], "name": "<script>"}))
    (tmp_path / "env.json").write_text(json.dumps({"devices": {"cpu": 8}, "commit": None}))
    return tmp_path


@pytest.fixture
def without_matplotlib(monkeypatch):
    find = importlib.util.find_spec
    hide = lambda name, *rest: None if name.partition(".")[0] == "matplotlib" else find(name, *rest)
    monkeypatch.setattr(importlib.util, "find_spec", hide)


def write(run, **more) -> str:
    path = write_report(
        run,
        title="A <small> model",
        model="2 layers of Attention and MLP",
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


def parse(page: str) -> ET.Element:
    return ET.fromstring(page.removeprefix("<!DOCTYPE html>"))


def test_report_has_no_scripts_or_external_resources(run):
    page = write(run).replace("</", "<")
    assert not re.search(r"https?:|//|src=|href=\"(?!#)|url\((?!#)|@import|<script|<link|<img|<iframe", page)


def test_report_is_well_formed_and_escaped(run):
    root = parse(write(run, headline={"bits < 3": "2.25"}))
    text = "".join(root.itertext())
    for wanted in ("A <small> model", "def <f>(", "\u2401\u2421", "<script>", "embed", "cpu 8", "2,112", "bits < 3"):
        assert wanted in text
    assert [line.text for line in root.findall(".//header/p")] == [
        "2 layers of Attention and MLP",
        "2.25 bits per byte & falling",
    ]
    rows = root.findall(".//table/tbody/tr[@class='total']/td")
    assert [cell.text for cell in rows if cell.text] == ["total", "2,112", "8,448"]
    assert "time in all" in text and "0:19" in text and "starts" in text


def test_report_obeys_no_control_character(run):
    """In names of metrics, the title, samples and tables: ESC, C1, what reverses a line, what hides in it, halves."""
    evil = "e\x1b[2J\x9b\u202e\u200bv\ud800\U000e0041"
    lines = [json.dumps({"step": step, evil: float(step)}) for step in (1, 2)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    path = write_report(
        run,
        title=evil,
        summary=evil,
        curves={evil: evil},
        unit=evil,
        baselines={evil: 1.0},
        headline={evil: evil},
        samples=[(evil, evil)],
        tables={evil: [{evil: evil}]},
    )
    page = path.read_text(encoding="utf-8")
    found = {character for character in page if escape_controls(character) != character}
    assert found == {"\n", "\u200b"}, "charts begin labels with a zero width space, before an underscore"
    labels = {element.text for element in parse(page).iter("text")}
    assert "e\\x1b[2J\\x9b\\u202e\u200bv\\ud800\\U000e0041 1.000" in labels


def test_report_draws_curve_and_baseline_in_two_sizes(run):
    root = parse(write(run))
    charts = root.findall(".//figure[@class]/svg")
    assert [x.get("class") for x in root.findall(".//figure[@class]")] == ["wide", "narrow"]
    for chart in charts:
        labels = {element.text for element in chart.iter("text")}
        assert {"train", "validation", "xz -9e 1.750", "steps", "bits per byte"} <= labels
    (norm,) = root.findall(".//section[@class='pair']/figure/svg")
    assert norm.get("aria-label") == "gradient norm against steps"


def test_report_without_matplotlib_has_tables_and_a_line(run, without_matplotlib):
    def refuse(width):
        raise ImportError("matplotlib")

    root = parse(write(run, best="lowest", plots={"A layout": Picture(refuse)}))
    assert not root.findall(".//svg")
    text = "".join(root.itertext())
    assert "Charts need matplotlib: pip install 'equizoo[tools]'" in text
    cells = [[cell.text for cell in row] for row in root.find(".//table[@class='results']").iter("tr")]
    assert cells[0] == [None, "first", "lowest", "last"]
    assert cells[2:] == [["validation", "2.500", "2.250", "2.250"], ["xz -9e", None, None, "1.750"]]
    for best, heads in (("highest", ["highest"]), (None, ["lowest", "highest"])):
        table = parse(write(run, best=best)).find(".//table[@class='results']")
        head, _, validation, _ = [[cell.text for cell in row] for row in table.iter("tr")]
        assert head == [None, "first", *heads, "last"] and validation[len(heads) + 1] == "2.500"


def test_configuration_begins_with_what_is_not_default(run):
    root = parse(write(run, defaults={"embed": 32, "data": (), "name": "<script>"}))
    tables = root.findall(".//table[@class='pairs']")
    assert [row.find("th").text for row in tables[0].iter("tr")] == ["embed"]
    (folded,) = root.findall(".//details")
    assert folded.find("summary").text == "2 defaults"
    assert [row.find("th").text for row in folded.iter("tr")] == ["data", "name"]
    assert "Every value is the default." in write(run, defaults={"embed": 64, "data": [], "name": "<script>"})


def test_report_strips_the_blank_ends_of_samples(tmp_path):
    samples = [("def f(", "x):\n    return x\n\n   \n\t"), ("a\n", " \n ")]
    page = write_report(tmp_path, title="t", summary="s", curves={}, unit="nats", samples=samples).read_text()
    assert "<pre><b>def f(</b>x):\n    return x</pre><pre><b>a\n</b></pre>" in page


def test_report_labels_samples_before_and_after(tmp_path):
    found = {"samples_before": [("1 + 1?\n", "<x"), ("b", "y")], "samples": [("1 + 1?\n", "2"), ("b", "z")]}
    path = write_report(tmp_path, title="t", summary="s", curves={}, unit="nats", **found)
    rows = [list(row) for row in parse(path.read_text()).iter("div") if row.get("class") == "pair samples"]
    shown = [[(cell.find("small").text, "".join(cell.find("pre").itertext())) for cell in row] for row in rows]
    assert shown == [[("before", "1 + 1?\n<x"), ("after", "1 + 1?\n2")], [("before", "by"), ("after", "bz")]]


def test_report_omits_empty_sections(tmp_path):
    page = write_report(tmp_path, title="t", summary="s", curves={"loss": "train"}, unit="nats").read_text()
    parse(page)
    assert "no values were logged" in page and "<h2>" not in page


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
        visits = {"visits": [[1, 1]]} if name == "a" else {}
        lines = [dict(step=step, loss=first / step, learning_rate=[0.1, 0.2], **visits) for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "config.json").write_text(json.dumps({"run": name}))
    return {"a": tmp_path / "a", "b < c": tmp_path / "b"}


def test_report_compares_runs(two, tmp_path):
    rows = [{"run": "a", "count": 1234, "share": 0.5}, {"run": "b < c", "count": 5, "share": "none"}]
    page = write_report(
        tmp_path, title="t", summary="s", curves={"loss": "loss"}, unit="nats", runs=two, tokens_per_step=100,
        tables={"The & end": rows}, loads={"visits": "Loads"},
    ).read_text()  # fmt: skip
    root = parse(page)
    wide, _, rate, load, _ = root.findall(".//svg")
    labels = [element.text for element in wide.iter("text")]
    assert {"a", "b < c", "tokens"} <= set(labels) and "loss" not in labels
    assert rate.get("aria-label") == "learning rate, median against tokens"
    assert load.get("aria-label") == "largest load, of an even share against tokens"
    loads = [element.text for element in load.iter("text")]
    assert "a" in loads and "b < c" not in loads, "b counted no tokens"
    cells = [[(cell.text, cell.get("class")) for cell in row] for row in root.find(".//table").iter("tr")]
    assert cells == [
        [("run", None), ("count", "number"), ("share", "number")],
        [("a", None), ("1,234", "number"), ("0.500", "number")],
        [("b < c", None), ("5", "number"), ("none", "number")],
    ]
    assert [element.text for element in root.iter("h2")] == ["The & end", "Loads", "Configuration"]


def test_loads_are_the_largest_of_any_layer():
    lines = [{"step": 1, "visits": [[4, 0, 2, 2], [2, 2, 2, 2]]}, {"step": 2}, {"step": 3, "visits": [[0, 0], [0, 6]]}]
    used, unused = _make_load_curves({"a": lines, "b": [{"step": 1}]}, "visits", 100)
    assert (used.label, used.x, used.values) == ("a", [100, 300], [2.0, 2.0])
    assert (unused.label, unused.values) == ("b", [])


def test_report_labels_curves_by_run_and_metric(two, tmp_path):
    curves = {"loss": "training", "validation": "validation"}
    page = write_report(tmp_path, title="t", summary="s", curves=curves, unit="nats", runs=two).read_text()
    labels = [element.text for element in parse(page).iter("text")]
    assert "a, training" in labels and "b < c, training" in labels and "a" not in labels[:20]
