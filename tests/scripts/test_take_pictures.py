"""Pictures of a report as standalone files."""

import re
import xml.etree.ElementTree as ET

import pytest

from scripts import take_pictures
from zoo.train.report.chart import Curve, draw_line_chart
from zoo.train.report.heatmap import draw_heatmaps
from zoo.train.report.page import _draw_both_sizes


@pytest.fixture
def report(tmp_path):
    def draw(width, height):
        return draw_line_chart([Curve("a & b", [1, 2], [2.0, 1.0])], {}, unit="nats", width=width, height=height)

    empty = _draw_both_sizes(lambda width, **_: draw_heatmaps([], unit="share", width=width))
    path = tmp_path / "report.html"
    path.write_text(f"<html><body><p>a > b</p>{_draw_both_sizes(draw)}{empty}{_draw_both_sizes(draw)}</body></html>")
    return path


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
