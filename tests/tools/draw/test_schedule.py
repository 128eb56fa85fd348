"""Pictures of schedules: every box where its work is, with its number where that fits."""

import re
import xml.etree.ElementTree as ET

import pytest

from zoo.parallel.schedule import Schedule, Timetable
from zoo.tools.draw import draw_schedule

SVG = "{http://www.w3.org/2000/svg}"
COLORS = {"forward": "#3d7fe0", "backward": "#d1620f"}
LEFT, RIGHT, TOP, ROW = 60, 8, 62, 26


def make(name: str, p: int, m: int, rounds: int = 1) -> Timetable:
    return Schedule(name).table(stages=p, microbatches=m, rounds=rounds)


def list_boxes(picture: ET.Element) -> list[tuple[str, float, float, float, float]]:
    """Return color, opacity, left, width and middle of each box."""
    boxes = []
    for path in picture.iter(f"{SVG}path"):
        style = path.get("style", "")
        color = re.search(r"fill: (#\w+)", style)
        if color and color[1] in COLORS.values():
            numbers = re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))
            x = [float(number) for number, _ in numbers]
            y = [float(number) for _, number in numbers]
            opacity = re.search(r"opacity: ([\d.]+)", style)
            middle = (min(y) + max(y)) / 2
            boxes.append((color[1], float(opacity[1]) if opacity else 1.0, min(x), max(x) - min(x), middle))
    return boxes


@pytest.mark.parametrize("width", [320, 860])
@pytest.mark.parametrize(("name", "p", "m", "rounds"), [("1f1b", 4, 8, 3), ("gpipe", 4, 8, 1)])
def test_boxes_are_where_the_work_is(name, p, m, rounds, width):
    table = make(name, p, m, rounds)
    picture = ET.fromstring(draw_schedule(table, width=width))
    per_unit = (width - LEFT - RIGHT) / table.cost()
    wanted = sorted(
        (COLORS[x.kind], LEFT + x.start * per_unit, x.duration * per_unit, TOP + ROW * (x.stage + 0.5), x.round)
        for x in table.list_work()
    )
    drawn = sorted((color, left, wide, middle, opacity) for color, opacity, left, wide, middle in list_boxes(picture))
    shades = {0: 1.0, 1: 0.5, 2: 0.35}
    for (color, left, wide, middle, number), found in zip(wanted, drawn, strict=True):
        assert found[0] == color and found[4] == shades[number]
        assert found[1] == pytest.approx(left, abs=0.01) and 0 < wide - found[2] < 1.01
        assert found[3] == pytest.approx(middle, abs=1)
    _, _, right, bottom = map(float, picture.get("viewBox").split())
    assert all(left + wide < right and middle < bottom for _, left, wide, middle, _ in drawn)


def test_numbers_are_those_of_the_micro_batches():
    """Every box of a row has its number if boxes are wide, in order of time; none has one if boxes are narrow."""
    picture = ET.fromstring(draw_schedule(make("1f1b", 2, 4)))
    numbers = [x for x in picture.iter(f"{SVG}text") if x.text.isdigit()]
    rows = {}
    for x in numbers:
        rows.setdefault(round(float(x.get("y"))), []).append((float(x.get("x")), x.text))
    first = sorted(rows[min(rows)])
    assert len(rows) == 2 and [number for _, number in first] == list("01203123")
    narrow = ET.fromstring(draw_schedule(make("1f1b", 2, 64), width=320))
    assert len(list_boxes(narrow)) == 2 * 2 * 64
    assert not [x for x in narrow.iter(f"{SVG}text") if x.text.isdigit()]


def test_picture_says_what_it_shows():
    picture = ET.fromstring(draw_schedule(make("1f1b", 4, 16, 2)))
    assert picture.get("role") == "img"
    assert picture.get("aria-label") == (
        "1F1B: 8.6% idle. 4 stages, 16 micro-batches, 2 rounds, later ones paler, in lockstep"
    )
    words = [x.text for x in picture.iter(f"{SVG}text")]
    assert {"stage 0", "stage 3", "1F1B: 8.6% idle", "■ forward", "■ backward"} <= set(words)
    assert "GPipe: 17.9% idle" in draw_schedule(make("gpipe", 8, 32))
