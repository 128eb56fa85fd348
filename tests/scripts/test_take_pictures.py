"""Pictures of a report as standalone files."""

import re
import xml.etree.ElementTree as ET

import pytest

from scripts import take_pictures
from zoo.tools.report import Curve, LineChart, write_report


@pytest.fixture
def report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    plots = {"Another": LineChart([Curve("a & b", [1, 2], [2.0, 1.0])], "nats")}
    return write_report(
        tmp_path, title="a > b", summary="s", curves={"loss": "a & b"}, unit="nats", baselines={"x": 1}, plots=plots
    )


def test_main_writes_every_picture(report, tmp_path, capsys):
    take_pictures.main(report, tmp_path / "x")
    names = ["x-1.svg", "x-1-narrow.svg", "x-2.svg", "x-2-narrow.svg"]
    assert [line.split("/")[-1] for line in capsys.readouterr().out.splitlines()] == [f"{x} written" for x in names]
    for name, width in zip(names, (860, 400, 860, 400), strict=True):
        text = (tmp_path / name).read_text()
        root = ET.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("viewBox").startswith(f"0 0 {width} ")
        assert "a & b" in "".join(root.itertext()) and "\n\n" not in text


def test_picture_defines_every_color_it_uses(report):
    (_, picture), *_ = take_pictures.iterate_pictures(report.read_text())
    used, defined = (
        set(re.findall(rule, picture)) for rule in (r"[:(] ?var\(--(?!zoo)([\w-]+)\)", r"--(?!zoo)([\w-]+): var")
    )
    assert used and used <= defined
    assert "--train: var(--zoo-own, #2563c9)" in picture and "--train: var(--zoo-own, #6ea8ff)" in picture
    assert ":root" not in picture


def test_main_raises_without_pictures(tmp_path):
    (tmp_path / "report.html").write_text("<html></html>")
    with pytest.raises(ValueError, match="has no pictures"):
        take_pictures.main(tmp_path / "report.html", tmp_path / "x")
