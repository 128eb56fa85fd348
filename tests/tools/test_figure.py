"""Pictures by matplotlib: the same bytes each time, in the ink of their page, and one line if it is not installed."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from zoo.tools._figure import COLORS, draw_svg

SVG = "{http://www.w3.org/2000/svg}"


def draw(figure):
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color=COLORS[0])
    axes.set_title("cost $5 \\foo $6 \x1b[2J")


def test_picture_stands_alone_in_the_ink_of_its_page():
    svg = draw_svg(draw, width=300, height=200, title="a < b \x1b")
    root = ET.fromstring(svg)
    assert root.get("viewBox") == "0 0 300 200" and root.get("aria-label") == "a < b \\x1b"
    assert root.get("fill") == "currentColor" and "color: CanvasText" in root.findtext(f"{SVG}style")
    colors = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", svg))
    assert colors <= {"none", "currentColor", COLORS[0]} and COLORS[0] in colors
    assert "cost $5 \\foo $6 \\x1b[2J" in {x.text for x in root.iter(f"{SVG}text")}
    assert not re.search(r"<\?xml|DOCTYPE|metadata|<script|\x1b|\n\s*\n", svg)
    assert svg == draw_svg(draw, width=300, height=200, title="a < b \x1b")


def test_pictures_of_one_page_share_no_names():
    """A clip path or a mark that a hidden picture shares with a visible one would hide it."""
    names = [
        set(re.findall(r'<(?:clipPath|path) id="([^"]*)"', draw_svg(draw, width=width, height=200, title=title)))
        for width, title in ((300, "a"), (400, "a"), (300, "b"))
    ]
    assert all(names) and len(set.union(*names)) == sum(map(len, names))


@pytest.mark.parametrize("color", COLORS)
def test_colors_read_on_white_and_on_near_black(color):
    def find_luminance(color):
        parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    own = find_luminance(color) + 0.05
    assert 1.05 / own > 3.8 and own / (find_luminance("#14171b") + 0.05) > 3.8


def test_missing_matplotlib_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"`matplotlib` cannot be imported .*: pip install 'equizoo\[tools\]'"):
        draw_svg(draw, width=300, height=200, title="")


def test_importing_the_tools_does_not_import_matplotlib():
    program = "import sys, zoo, zoo.tools, zoo.tools.draw, zoo.tools.report; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
