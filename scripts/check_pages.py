"""MkDocs hook: check that every page of the built site reads as it was written.

A page shows as many code boxes as its source has fences, no line too long for a box on a laptop, no Markdown or math
as it was typed, and only links, anchors and pictures that exist. A strict build fails where one does not;
scripts/browse_site.py looks at the same pages in a browser.
"""

import logging
import re
from collections.abc import Iterator
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from posixpath import join, normpath
from urllib.parse import unquote

COLUMNS = 88
"""Characters that fit into a code box at 1,280 pixels, beside the menu and the table of contents."""
COLUMNS_OF_API = 120
"""Characters that fit into a code box of a docstring at 1,200 pixels: its letters are smaller."""
FENCE = re.compile(r"^ *(`{3,})[^\n`]*\n.*?^ *\1 *$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
UNRENDERED = {
    "a fence": re.compile(r"```|~~~"),
    "bold": re.compile(r"\*\*\w|\w\*\*"),
    "a link": re.compile(r"\]\(|\]\["),
    "a table": re.compile(r"\|\s*:?-{2,}"),
    "a heading": re.compile(r"^#{1,6} ", re.MULTILINE),
    "math": re.compile(r"\$\$|\\[(\[]"),
    "an attribute list": re.compile(r"\{ *[.#][\w-]+ *\}"),
    "an admonition": re.compile(r"^(?:!!!|\?\?\?) ", re.MULTILINE),
    "a snippet": re.compile(r"--8<--"),
    "a command": re.compile(r"^\s*(?:\$|>>>) \w", re.MULTILINE),
    "an import": re.compile(r"^\s*(?:import \w+|from [\w.]+ import )", re.MULTILINE),
}
"""Marks of source that reached the reader outside of code."""
RUN_ON = re.compile(r"(?:python|py|console|bash|sh|text|json|yaml|toml)(?: [\w-]+)?\n|(?:.*\n){2}")
"""Inline code that was a fence: it begins with the name of a language, or has three lines."""
VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())

log = logging.getLogger("mkdocs.hooks.check_pages")


class Page(HTMLParser):
    """Parser of a built page: its text outside of code, its code, its anchors and its links."""

    def __init__(self, html: str):
        super().__init__()
        self.boxes: list[str] = []
        self.inline: list[str] = []
        self.text: list[str] = []
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        if "href" in attributes or "src" in attributes:
            self.links.append(attributes.get("href") or attributes.get("src", ""))
        if tag in VOID:
            return
        self._open.append(tag)
        if "article" in self._open:
            if tag == "pre":
                self.boxes.append("")
            elif tag == "code" and "pre" not in self._open:
                self.inline.append("")
            elif tag in ("p", "li", "td", "th", "h1", "h2", "h3", "h4", "h5", "dd", "figcaption", "div"):
                self.text.append("")

    def handle_endtag(self, tag: str) -> None:
        while tag in self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "article" not in self._open or not {"svg", "script", "style"}.isdisjoint(self._open):
            return
        if "pre" in self._open:
            self.boxes[-1] += data
        elif "code" in self._open:
            self.inline[-1] += data
        else:
            self.text[-1:] = [(self.text[-1] if self.text else "") + data]


class Site:
    """The pages of a built site by their paths."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def pages(self) -> dict[str, Page]:
        paths = sorted(self.folder.rglob("*.html"))
        return {x.relative_to(self.folder).as_posix(): Page(x.read_text(encoding="utf-8")) for x in paths}

    def find_faults(self, sources: Path) -> Iterator[str]:
        """Yield "page: fault" for each fault of each page, whose Markdown is in `sources`."""
        for path, page in self.pages.items():
            source = (sources / path).with_suffix(".md")
            markdown = source.read_text(encoding="utf-8") if source.is_file() else None
            columns = COLUMNS_OF_API if path.startswith("api/") else COLUMNS
            code_faults = find_code_faults(page, markdown, columns)
            faults = [*find_text_faults(page), *code_faults, *self._find_dead_links(path, page)]
            yield from (f"{path}: {fault}" for fault in faults)

    def _find_dead_links(self, path: str, page: Page) -> Iterator[str]:
        for link in page.links:
            if re.match(r"[a-z][a-z0-9+.-]*:|//", link, re.IGNORECASE):
                continue  # check_site.py knows about other hosts
            target, _, anchor = unquote(link).partition("#")
            target = normpath(join("/", path, "..", target.partition("?")[0])).lstrip("/") if target else path
            if not (self.folder / target).exists():
                yield f"{link} is a link to nothing"
            elif anchor and target in self.pages and anchor not in self.pages[target].anchors:
                yield f"{link} is a link to no place of {target}"


def find_text_faults(page: Page) -> Iterator[str]:
    """Yield the faults of a page's text outside of code boxes."""
    for text in page.text:
        for name, mark in UNRENDERED.items():
            if found := mark.search(text):
                yield f"{name} is not rendered: {_excerpt(text[found.start() :])}"
    for code in page.inline:
        if "```" in code or RUN_ON.match(code):
            yield f"a code box is a paragraph: {_excerpt(code)}"


def find_code_faults(page: Page, markdown: str | None, columns: int = COLUMNS) -> Iterator[str]:
    """Yield the faults of a page's code boxes; of their number only if it has Markdown, and nothing from docstrings."""
    for box in page.boxes:
        for line in box.splitlines():
            if len(line) > columns:
                yield f"a line of {len(line)} characters is cut off, {columns} fit: {_excerpt(line)}"
    if markdown is not None and not re.search(r"^::: ", markdown, re.MULTILINE):
        fences = len(FENCE.findall(COMMENT.sub("", markdown)))
        if fences != len(page.boxes):
            yield f"{fences} fences became {len(page.boxes)} code boxes"


def _excerpt(text: str) -> str:
    return " ".join(text.split())[:70]


def on_post_build(config, **_) -> None:
    """Warn of each fault, which fails a strict build."""
    for line in Site(Path(config["site_dir"])).find_faults(Path(config["docs_dir"])):
        log.warning("%s", line)
