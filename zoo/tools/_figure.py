"""Pictures drawn by matplotlib as SVG that reads on a light and on a dark page.

Ink is `currentColor`, which a page gives to a picture in it, and a browser to a file of its own. The other colors are
of middle lightness: their contrast to white and to near black is at least 3.8.
"""

import io
import re
from collections.abc import Callable
from html import escape
from typing import Any

from zoo._optional import import_optional
from zoo._terminal import escape_controls

INK = "#000000"
COLORS = ("#3d7fe0", "#d1620f", "#2b8f57", "#a262d9", "#d94a55", "#967a10", "#178a9c", "#c853ab")
"""Blue, orange, green, purple, red, ochre, teal, pink."""
INSTALL = "pip install 'equizoo[tools]'"
POINTS_PER_INCH = 72
"""Pixels of a picture per inch of its figure."""
SHOWN_UNDERSCORE = "\N{ZERO WIDTH SPACE}"
"""Begins a label that begins with an underscore, which matplotlib would hide."""
_SETTINGS = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.sans-serif": "DejaVu Sans",
    "font.size": 11,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
_ROOT = (
    '<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" '
    'aria-label="{title}" fill="currentColor" stroke-linejoin="round">\n'
    "<style>svg:root {{ color-scheme: light dark; color: CanvasText; background: Canvas }}</style>"
)


def draw_svg(draw: Callable[[Any], None], *, width: float, height: float, title: str) -> str:
    """Call `draw` with a figure of this size in pixels, and return the figure as an `<svg>` element, equal each time.

    `title` describes the picture for readers that do not see it. **Raises** `ImportError` without matplotlib.
    """
    matplotlib = import_optional("matplotlib", INSTALL)
    figure_module = import_optional("matplotlib.figure", INSTALL)
    title = escape_controls(title)
    salt = f"{title} {width}"  # pictures of one page must not share the names of their parts
    with matplotlib.rc_context(_SETTINGS | {"svg.hashsalt": salt}):
        figure = figure_module.Figure(figsize=(width / POINTS_PER_INCH, height / POINTS_PER_INCH))
        draw(figure)
        for words in figure.findobj(lambda artist: hasattr(artist, "set_text")):  # names of metrics and of runs
            words.set_text(escape_controls(words.get_text(), keep=f"\n{SHOWN_UNDERSCORE}"))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    _, _, element = file.getvalue().partition("<svg")
    head, _, body = element.partition(">")
    (box,) = re.findall(r'viewBox="[^"]*"', head)
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = body.replace(INK, "currentColor").replace("xlink:href", "href")
    body = re.sub(r"\s*\n\s*", "\n", body)  # a blank line ends the HTML of a Markdown page
    return f"{_ROOT.format(box=box, title=escape(title))}{body.rstrip()}"
