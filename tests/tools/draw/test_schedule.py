"""Pictures of schedules: every box where its work is, numbers where they fit, nothing outside of the picture."""

import itertools
import xml.etree.ElementTree as ET

import pytest

from zoo.parallel.schedule import Schedule, Timetable
from zoo.tools.draw import draw_schedule

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = [("1f1b", 4, 8, 1), ("1f1b", 4, 8, 3), ("gpipe", 4, 8, 1)]
each_width = pytest.mark.parametrize("width", [320, 860])
each_table = pytest.mark.parametrize(("name", "p", "m", "rounds"), DRAWN)


def make(name: str, p: int, m: int, rounds: int = 1) -> Timetable:
    return Schedule(name).table(stages=p, microbatches=m, rounds=rounds)


def list_boxes(row: ET.Element) -> list[dict[str, str]]:
    return [x.attrib for x in row.iter(f"{SVG}rect") if x.get("class", "").startswith("box ")]


@each_width
@each_table
def test_boxes_are_where_the_work_is(name, p, m, rounds, width):
    table = make(name, p, m, rounds)
    picture = ET.fromstring(draw_schedule(table, width=width))
    rows = [x for x in picture.iter(f"{SVG}g") if x.get("class") == "stage"]
    work = table.list_work()
    span = max(x.start + x.duration for x in work)
    assert len(rows) == p
    lines = []
    for stage, row in enumerate(rows):
        boxes = list_boxes(row)
        per_unit = (width - 58 - 8) / span
        drawn = sorted((x["class"], float(x["x"]), float(x["width"])) for x in boxes)
        wanted = sorted(
            (f"box {x.kind} round{x.round}", 58 + x.start * per_unit, x.duration * per_unit)
            for x in work
            if x.stage == stage
        )
        for found, expected in zip(drawn, wanted, strict=True):
            assert found[0] == expected[0] and found[1:] == pytest.approx(expected[1:], abs=0.011)
        spans = sorted((float(x["x"]), float(x["x"]) + float(x["width"])) for x in boxes)
        assert all(end <= begin + 0.02 for (_, end), (begin, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= width - 8 + 0.02
        lines.append({(float(x["y"]), float(x["height"])) for x in boxes})
    assert all(len(line) == 1 for line in lines)
    edges = sorted((y, y + height) for ((y, height),) in lines)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(edges))
    assert edges[-1][1] < float(picture.get("viewBox").split()[3])


def test_numbers_are_those_of_the_micro_batches():
    """Every box of a row has its number if boxes are wide, in order of time; none has one if boxes are narrow."""
    table = make("1f1b", 2, 4)
    picture = ET.fromstring(draw_schedule(table))
    first = next(x for x in picture.iter(f"{SVG}g"))
    numbers = sorted((float(x.get("x")), x.text) for x in first.iter(f"{SVG}text") if "number" in x.get("class"))
    assert [number for _, number in numbers] == list("01203123")
    narrow = ET.fromstring(draw_schedule(make("1f1b", 2, 64), width=320))
    boxes = list_boxes(narrow)
    assert len(boxes) == 2 * 2 * 64
    assert float(next(narrow.iter(f"{SVG}g")).get("stroke-width")) < 0.2 * min(float(x["width"]) for x in boxes)
    assert not [x for x in narrow.iter(f"{SVG}text") if "number" in x.get("class", "")]


@each_width
@each_table
def test_legend_names_what_is_drawn_and_fits(name, p, m, rounds, width):
    picture = ET.fromstring(draw_schedule(make(name, p, m, rounds), width=width))
    texts = list(picture.iter(f"{SVG}text"))
    words = " ".join(x.text for x in texts)
    assert "forward" in words and "backward" in words
    assert ("rounds 0 to 2" in words) == (rounds == 3)
    for x in texts:
        if x.get("class") is None:  # the longest of these letters is 6.5 pixels
            assert float(x.get("x")) + 5.6 * len(x.text) < width
    samples = sorted(
        (float(x.get("y")), float(x.get("x"))) for x in picture.iter(f"{SVG}rect") if "sample" in x.get("class")
    )
    assert all(y != other_y or other - x >= 13 for (y, x), (other_y, other) in itertools.pairwise(samples))


def test_picture_is_accessible_and_alone():
    text = draw_schedule(make("1f1b", 4, 16, 2))
    picture = ET.fromstring(text)
    assert picture.get("role") == "img"
    assert picture.find(f"{SVG}title").text == "1F1B: 8.6% idle"
    assert picture.find(f"{SVG}desc").text.startswith("4 stages, 16 micro-batches, 2 rounds, in lockstep.")
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "") and "prefers-color-scheme: dark" in text
    assert "<title>GPipe: 17.9% idle</title>" in draw_schedule(make("gpipe", 8, 32))
