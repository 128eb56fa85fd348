"""Pictures of a report as files of their own."""

import xml.etree.ElementTree as ET

import pytest

from scripts import take_pictures
from zoo.tools.report import Curve, LineChart, write_report


def test_main_writes_every_picture(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    plots = {"Another": LineChart([Curve("a & b", [1, 2], [2.0, 1.0])], "nats")}
    report = write_report(tmp_path, title="a > b", summary="s", curves={"loss": "a & b"}, unit="nats", plots=plots)
    take_pictures.main(report, tmp_path / "x")
    names = ["x-1.svg", "x-1-narrow.svg", "x-2.svg", "x-2-narrow.svg"]
    assert [line.split("/")[-1] for line in capsys.readouterr().out.splitlines()] == [f"{x} written" for x in names]
    for name, width in zip(names, (860, 400, 860, 400), strict=True):
        text = (tmp_path / name).read_text()
        root = ET.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("viewBox").startswith(f"0 0 {width} ")
        assert "a & b" in "".join(root.itertext())


def test_main_raises_without_pictures(tmp_path):
    (tmp_path / "report.html").write_text("<html></html>")
    with pytest.raises(ValueError, match="has no pictures"):
        take_pictures.main(tmp_path / "report.html", tmp_path / "x")
