"""Faults of built pages are found: each planted one, and the fences of a second word as the site renders them."""

from pathlib import Path

import markdown
import pytest

from scripts import check_pages
from scripts.check_pages import COLUMNS, Page, Site

ROOT = Path(__file__).parents[2]
EXTENSIONS = ["admonition", "attr_list", "md_in_html", "tables", "toc", "pymdownx.highlight", "pymdownx.superfences"]


def render(text: str) -> str:
    return f"<html><body><article>{markdown.markdown(text, extensions=EXTENSIONS)}</article></body></html>"


def find_faults(tmp_path: Path, text: str, *, html: str | None = None) -> list[str]:
    site, sources = tmp_path / "site", tmp_path / "docs"
    for folder in (site, sources):
        folder.mkdir()
    (sources / "page.md").write_text(text)
    (site / "page.html").write_text(html or render(text))
    (site / "picture.svg").write_text("<svg/>")
    (site / "other.html").write_text('<article><h2 id="place">Place</h2></article>')
    return list(Site(site).find_faults(sources))


GOOD = f"""# Title

Bold **words**, `*args, **kwargs`, `a[0](1)`, $3 for a `$ command`, and a [link](other.html#place), [here](#title).

```python title="x"
import torch  # ** and ]( are code here
{"x" * COLUMNS}
```

- ![picture](picture.svg) <!-- ``` -->

    ```console
    $ zoo info
    ```

| a | b |
|---|--:|
| `x | y` | 2 |

[There](https://example.org) and `one command over
two lines`.
"""
PLANTED = {
    "fence of a second word": (
        "```python no-run\nimport torch\nx = 1\n```",
        "a code box is a paragraph: python no-run",
    ),
    "console fence of a second word": ("```console fails\n$ zoo info x\n```", "1 fences became 0 code boxes"),
    "fence that is not closed": ("Text.\n\n```python\nx = 1", "a fence is not rendered: ```python x = 1"),
    "bold": ("a **\nb** c, a**b", "bold is not rendered: b** c"),
    "link": ("[text][gone]", "a link is not rendered: ][gone]"),
    "table after text": ("text\n| a | b |\n|---|---|\n| 1 | 2 |", "a table is not rendered: |---|---|"),
    "math": ("so $$x^2$$", "math is not rendered: $$x^2$$"),
    "attribute list": ("a\n\nb { .lead } c", "an attribute list is not rendered: { .lead }"),
    "code as text": ("import torch\nx = 1", "an import is not rendered: import torch"),
    "command as text": ("$ zoo info", "a command is not rendered: $ zoo info"),
    "long line": (f"```\n{'x' * (COLUMNS + 1)}\n```", "a line of 89 characters is cut off, 88 fit"),
    "picture": ("![x](gone.svg)", "gone.svg is a link to nothing"),
    "page": ("[x](gone.html)", "gone.html is a link to nothing"),
    "anchor": ("[x](other.html#gone)", "other.html#gone is a link to no place of other.html"),
    "anchor of its own": ("[x](#gone)", "#gone is a link to no place of page.html"),
}


def test_good_page_has_no_faults(tmp_path):
    assert find_faults(tmp_path, GOOD) == []


@pytest.mark.parametrize(("text", "fault"), PLANTED.values(), ids=PLANTED)
def test_planted_fault_is_found(tmp_path, text, fault):
    found = find_faults(tmp_path, text)
    assert any(line.startswith(f"page.html: {fault}") for line in found), found


def test_code_boxes_are_not_counted_where_docstrings_add_some(tmp_path):
    text = "::: zoo.load"
    assert find_faults(tmp_path, text, html="<article><pre><code>a\n</code></pre></article>") == []


def test_lines_of_the_api_reference_may_be_longer(tmp_path):
    html = f"<article><pre><code>{'x' * 120}\n</code></pre></article>"
    find_faults(tmp_path, "::: zoo.load", html=html)
    site = tmp_path / "site"
    (site / "api").mkdir()
    (site / "page.html").rename(site / "api" / "page.html")
    assert list(Site(site).find_faults(tmp_path / "docs")) == []
    (site / "api" / "page.html").rename(site / "page.html")
    (fault,) = Site(site).find_faults(tmp_path / "docs")
    assert "a line of 120 characters is cut off, 88 fit" in fault


def test_page_reads_text_code_and_links_of_the_article_only():
    article = "<p>a <code>b</code> c<br></p><pre>d\n<b>e</b></pre><img src=f><svg>**</svg>"
    page = Page(f'<nav>**<a href="x.html">x</a></nav><article>{article}</article>')
    assert (page.text, page.inline, page.boxes, page.links) == (["a  c"], ["b"], ["d\ne"], ["x.html", "f"])


def test_post_build_warns_of_faults(tmp_path, caplog):
    find_faults(tmp_path, "[x](gone.html)")
    check_pages.on_post_build({"site_dir": str(tmp_path / "site"), "docs_dir": str(tmp_path / "docs")})
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.name.startswith("mkdocs.")


def test_strict_build_runs_the_checks():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "\nstrict: true\n" in config and "\n  - scripts/check_pages.py\n" in config
    assert [name for name in EXTENSIONS if f"\n  - {name}" not in config] == []
