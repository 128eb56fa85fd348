"""MkDocs hook: write llms.txt, the pages of the menu with a sentence on each, for programs that read the site.

The form is https://llmstxt.org's: a title, a summary, and a list of links for each section of the menu.
"""

import html
import re
from collections.abc import Iterator
from typing import Any

SENTENCE = re.compile(r"<p(?: [^>]*)?>(.*?[.:])(?=\s|</p>)", re.DOTALL)
TAG = re.compile(r"<[^>]+>")


def summarize(content: str) -> str:
    """Return the first sentence of a rendered page."""
    found = SENTENCE.search(content)
    return " ".join(html.unescape(TAG.sub("", found[1])).split()) if found else ""


def list_lines(page: Any) -> Iterator[str]:
    """Yield a heading for each section and a link for each page of the menu, from its first page on."""
    section = None
    while page is not None:
        names = [ancestor.title for ancestor in reversed(page.ancestors)]
        if names != section:
            section = names
            yield f"\n## {': '.join(names)}\n"
        summary = summarize(page.content or "")
        yield f"- [{page.title}]({page.canonical_url or page.url})" + (f": {summary}" if summary else "")
        page = page.next_page


def on_env(env, *, config, files):
    """Add the file to the site, once all pages are rendered."""
    from mkdocs.structure.files import File

    pages = [file.page for file in files.documentation_pages()]
    (first,) = (page for page in pages if page.previous_page is None and page.next_page is not None)
    text = "\n".join([f"# {config['site_name']}\n\n> {config['site_description']}", *list_lines(first)])
    files.append(File.generated(config, "llms.txt", content=f"{text}\n"))
    return env
