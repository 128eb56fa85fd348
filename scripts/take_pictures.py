"""Extract the pictures of a report as SVG files for a page of the documentation.

python scripts/take_pictures.py runs/moe/report.html docs/pictures/moe  # moe-1.svg, moe-1-narrow.svg, ...
"""

import re
from collections.abc import Iterator
from pathlib import Path

import tyro

PICTURE = re.compile(r'<figure class="(wide|narrow)"><svg (.*?</svg>)\s*</figure>', re.DOTALL)


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
        path.write_text(f"{picture}\n", encoding="utf-8")
        print(f"{path} written")


def iterate_pictures(page: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each picture, "1" or "1-narrow", and its SVG."""
    number = 0
    for width, picture in PICTURE.findall(page):
        number += width == "wide"
        yield f"{number}{'-narrow' if width == 'narrow' else ''}", f'<svg xmlns="http://www.w3.org/2000/svg" {picture}'


if __name__ == "__main__":
    tyro.cli(main)
