"""A hook of mkdocs: the built site must load nothing from another host.

Links that a reader may follow can lead anywhere. What a page fetches by itself, scripts, styles, fonts and pictures,
lies in the site; so does what the theme would fetch later for a diagram or the numbers of a repository.
"""

import logging
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

LOADED = {
    "src": ("script", "img", "iframe", "embed", "audio", "video", "source", "track", "input"),
    "srcset": ("img", "source"),
    "href": ("link", "image", "use"),
    "xlink:href": ("image", "use"),
    "data": ("object",),
    "poster": ("video",),
}
"""Attributes whose address a browser fetches, and on which elements."""
ADDRESS = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:[a-z][a-z0-9+.-]*:)?//[^"')\s]+)""", re.IGNORECASE)
FOREIGN = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
NAMED_ONLY = ("canonical", "alternate", "author", "license", "me", "next", "prev")
"""Kinds of `<link>` that say something and load nothing."""
LATER = {
    "mermaid": "the theme fetches a script to draw mermaid; draw SVG",
    "md-source": "the theme asks a forge for facts",
}
"""Classes for which the theme's script asks another host, and why not."""

log = logging.getLogger("mkdocs.hooks.check_site")


class Page(HTMLParser):
    """What a page of HTML loads from other hosts."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[str] = []
        self.in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.in_style = tag == "style"
        names_only = tag == "link" and given.get("rel", "") in NAMED_ONLY
        for name, value in given.items():
            if tag in LOADED.get(name, ()) and not names_only:
                addresses = (
                    [part.split()[0] for part in value.split(",") if part.split()] if name == "srcset" else [value]
                )
                self.found += [f"<{tag} {name}={x!r}>" for x in addresses if FOREIGN.match(x.strip())]
        self.found += [f"a style of <{tag}>: {x}" for x in ADDRESS.findall(given.get("style", ""))]
        self.found += [
            f"<{tag} class={word!r}>: {LATER[word]}" for word in given.get("class", "").split() if word in LATER
        ]

    def handle_endtag(self, tag: str) -> None:
        self.in_style = False

    def handle_data(self, data: str) -> None:
        if self.in_style:
            self.found += [f"<style>: {x}" for x in ADDRESS.findall(data)]


def foreign(site: Path) -> Iterator[str]:
    """What the files of a built site would load from other hosts, as "file: what"."""
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".svg"):
            yield from (f"{path.relative_to(site)}: {x}" for x in Page(path.read_text(encoding="utf-8")).found)
        elif path.suffix == ".css":
            found = ADDRESS.findall(path.read_text(encoding="utf-8"))
            yield from (f"{path.relative_to(site)}: {x}" for x in found)


def on_post_build(config, **_) -> None:
    """A warning for each, which ends a strict build."""
    for line in foreign(Path(config["site_dir"])):
        log.warning("The site loads from another host: %s", line)
