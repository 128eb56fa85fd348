"""Take the pictures out of a report, so that a page of the documentation can show them.

    python scripts/take_pictures.py runs/moe/report.html docs/pictures/moe  # moe-1.svg, moe-1-narrow.svg, ...

A picture brings the report's colors with it, light and dark; a page that has colors of its own, named `--zoo-`, lends
it those.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import tyro

from zoo.train.report.style import CHART, COLORS

FOUND = re.compile(r'<div class="(wide|narrow)">(<svg class="chart" .*?</svg>)</div>', re.DOTALL)
OF_THE_SITE = {"train": "own", "held-out": "moves"}
"""Colors that docs/stylesheets/site.css calls otherwise."""
FONT = '.chart { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }'


def main(report: tyro.conf.Positional[Path], target: tyro.conf.Positional[Path]) -> None:
    """Write every picture of `report` into a file of its own.

    Args:
        report: What a recipe left: report.html.
        target: Where to, and how the files' names begin.
    """
    found = list(pictures(report.read_text(encoding="utf-8")))
    if not found:
        raise ValueError(f"{report} has no pictures: is it the report of a recipe?")
    for name, picture in found:
        path = target.with_name(f"{target.name}-{name}.svg")
        path.write_text(picture, encoding="utf-8")
        print(f"{path} written")


def pictures(page: str) -> Iterator[tuple[str, str]]:
    """Each with a name: its number, and whether it is the narrow one."""
    number = 0
    for width, picture in FOUND.findall(page):
        number += width == "wide"
        yield f"{number}{'-narrow' if width == 'narrow' else ''}", make_standalone(picture)


def make_standalone(picture: str) -> str:
    """An `<svg>` element of a report as a file that stands by itself, an element a line."""
    head, rest = picture.split(">", 1)
    lines = f'{head} xmlns="http://www.w3.org/2000/svg">\n<style>\n{style()}\n</style>{rest}'.replace("><", ">\n<")
    return f"{lines}\n"


def style() -> str:
    def lent(color: re.Match) -> str:
        return f"--{color[1]}: var(--zoo-{OF_THE_SITE.get(color[1], color[1])}, {color[2]})"

    colors = re.sub(r"--([\w-]+): (#\w+)", lent, COLORS.replace(":root", ".chart"))
    return "\n".join(line for line in f"{colors}\n{CHART}\n{FONT}".splitlines() if line)


if __name__ == "__main__":
    tyro.cli(main)
