"""MkDocs hook: write the pages that follow from the code before a site is built, and list those of the API in its menu.

The pages are families, public names, the file tree, the API reference and pictures of pipelines. Git ignores them: a
clone has them after its first build. `mkdocs serve` writes them once, since it never imports changed code again.
"""

import functools
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INDEX = "api/index.md"
"""Page of the API in the menu of mkdocs.yml, in whose place the hook puts a section of all of them."""


@functools.cache
def write_pages() -> tuple[str, ...]:
    """Write the site's pages, remove those of packages that are gone, and return the paths of the API's below docs/."""
    if str(ROOT) not in sys.path:  # `mkdocs build`, unlike `python -m mkdocs build`, does not add the working directory
        sys.path.insert(0, str(ROOT))
    from scripts import make_pages  # here, since MkDocs restores the path that it loads a hook with

    make_pages.use_cpu()
    pages = make_pages.list_site_pages()
    make_pages.write_stale(pages)
    for path in (make_pages.ROOT / "docs" / "api").glob("*.md"):
        if path.relative_to(make_pages.ROOT).as_posix() not in pages:
            path.unlink()
    return tuple(path.removeprefix("docs/") for path in pages if path.startswith("docs/api/"))


def fill_menu(menu: list[Any], pages: tuple[str, ...]) -> list[Any]:
    """Return a menu with a section of the API's `pages` in the place of their index."""
    packages = [{path.removeprefix("api/").removesuffix(".md"): path} for path in pages if path != INDEX]
    section = [{"Packages": INDEX}, *packages]

    def fill(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        ((title, target),) = entry.items()
        if target == INDEX:
            return {title: section}
        return {title: fill_menu(target, pages)} if isinstance(target, list) else entry

    return [fill(entry) for entry in menu]


def on_config(config, **_):
    """Write the pages, before MkDocs lists the files of docs/."""
    config["nav"] = fill_menu(config["nav"], write_pages())
    return config
