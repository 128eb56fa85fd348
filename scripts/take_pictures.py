"""Extract the pictures of a report as SVG files for a page of the documentation.

    python scripts/take_pictures.py runs/moe/report.html docs/pictures/moe  # moe-1.svg, moe-1-narrow.svg, ...

A picture has the report's colors, light and dark; CSS variables of the page, named `--zoo-...`, override them.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import tyro

from zoo.tools.report.style import CHART, COLORS

PICTURE = re.compile(r'<figure class="(wide|narrow)">(<svg class="chart" .*?</svg>)</figure>', re.DOTALL)
SITE_COLORS = {"train": "own", "held-out": "moves"}
"""Names in docs/stylesheets/site.css of the report's colors, where they differ."""
FONT = '.chart { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }'


def main(report: tyro.conf.Positional[Path], target: tyro.conf.Positional[Path]) -> None:
    """Write every picture of `report` to its own file.

    Args:
        report: A recipe's report.html.
        target: Folder and prefix of the files.
    """
    found = list(iterate_pictures(report.read_text(encoding="utf-8")))
    if not found:
        raise ValueError(f"{report} has no pictures: is it the report of a recipe?")
    for name, picture in found:
        path = target.with_name(f"{target.name}-{name}.svg")
        path.write_text(picture, encoding="utf-8")
        print(f"{path} written")


def iterate_pictures(page: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each picture, "1" or "1-narrow", and its SVG."""
    number = 0
    for width, picture in PICTURE.findall(page):
        number += width == "wide"
        yield f"{number}{'-narrow' if width == 'narrow' else ''}", make_standalone(picture)


def make_standalone(picture: str) -> str:
    """Return an `<svg>` element of a report as a standalone file, with one element per line."""
    head, rest = picture.split(">", 1)
    lines = f'{head} xmlns="http://www.w3.org/2000/svg">\n<style>\n{build_style()}\n</style>{rest}'.replace(
        "><", ">\n<"
    )
    return f"{lines}\n"


def build_style() -> str:
    """Return the report's CSS, with the page's colors as overrides."""

    def override(color: re.Match) -> str:
        return f"--{color[1]}: var(--zoo-{SITE_COLORS.get(color[1], color[1])}, {color[2]})"

    colors = re.sub(r"--([\w-]+): (#\w+)", override, COLORS.replace(":root", ".chart"))
    return "\n".join(line for line in f"{colors}\n{CHART}\n{FONT}".splitlines() if line)


if __name__ == "__main__":
    tyro.cli(main)
