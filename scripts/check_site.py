"""MkDocs hook: check that the built site loads nothing from another host.

Links to follow may lead anywhere. Resources that a page fetches by itself (scripts, styles, fonts, pictures) must be
part of the site; so must those that the theme would fetch later, for a diagram or the facts of a repository.
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
"""Attributes whose URL a browser fetches, and the elements for which it does."""
ADDRESS = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:[a-z][a-z0-9+.-]*:)?//[^"')\s]+)""", re.IGNORECASE)
FOREIGN = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
NAMED_ONLY = ("canonical", "alternate", "author", "license", "me", "next", "prev")
"""Relations of `<link>` that load nothing."""
LATER = {
    ("class", "mermaid"): "the theme fetches a script to draw mermaid; draw SVG",
    ("data-md-component", "source"): "the theme asks a forge for facts; docs/overrides leaves the attribute out",
}
"""Attributes and their words for which the theme's script contacts another host, with the remedy."""

log = logging.getLogger("mkdocs.hooks.check_site")


class Page(HTMLParser):
    """Parser that collects the resources that a page of HTML loads from other hosts."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[str] = []
        self.in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.in_style = tag == "style"
        names_only = tag == "link" and attributes.get("rel", "") in NAMED_ONLY
        for name, value in attributes.items():
            if tag in LOADED.get(name, ()) and not names_only:
                addresses = (
                    [part.split()[0] for part in value.split(",") if part.split()] if name == "srcset" else [value]
                )
                self.found += [f"<{tag} {name}={x!r}>" for x in addresses if FOREIGN.match(x.strip())]
        self.found += [f"a style of <{tag}>: {x}" for x in ADDRESS.findall(attributes.get("style", ""))]
        self.found += [
            f"<{tag} {name}={word!r}>: {LATER[name, word]}"
            for name, value in attributes.items()
            for word in value.split()
            if (name, word) in LATER
        ]

    def handle_endtag(self, tag: str) -> None:
        self.in_style = False

    def handle_data(self, data: str) -> None:
        if self.in_style:
            self.found += [f"<style>: {x}" for x in ADDRESS.findall(data)]


def find_foreign(site: Path) -> Iterator[str]:
    """Yield "file: resource" for each resource that a built site would load from another host."""
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".svg"):
            yield from (f"{path.relative_to(site)}: {x}" for x in Page(path.read_text(encoding="utf-8")).found)
        elif path.suffix == ".css":
            found = ADDRESS.findall(path.read_text(encoding="utf-8"))
            yield from (f"{path.relative_to(site)}: {x}" for x in found)


def on_post_build(config, **_) -> None:
    """Warn of each foreign resource, which fails a strict build."""
    for line in find_foreign(Path(config["site_dir"])):
        log.warning("The site loads from another host: %s", line)
