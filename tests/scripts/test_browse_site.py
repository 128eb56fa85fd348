"""The built site in a browser: every page at each width, what the search finds, and faults that are planted."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import browse_site, make_pages
from scripts.browse_site import browse, find_faults
from scripts.check_pages import COLUMNS

ROOT = Path(__file__).parents[2]
GOOD = {"window": 1440, "inner": 1440, "width": 1440, "outside": [], "cut": [], "images": [], "faults": []}
BROKEN = {
    "script": ({"faults": ["x is not defined"]}, "x is not defined at the console"),
    "picture": ({"images": ["gone.svg"]}, "picture does not load: gone.svg"),
    "page": ({"width": 1500}, "is 1500 pixels wide in a window of 1440"),
    "element": ({"outside": ["<p>"]}, "ends outside of the window: <p>"),
    "code": ({"cut": ["code of 9 in 8: x"]}, "cuts off code of 9 in 8: x"),
    "table": ({"window": 420, "cut": ["table of 9 in 8: x"]}, "cuts off table of 9 in 8: x"),
}
FIRST = 3
"""Pages among which a reader finds it."""
TERMS = {
    "optimizer": "train.html",
    "GQA": "families.html",
    "KV cache": "generate.html",
    "JSONL": "resume.html",
    "LoRA": "adapters.html",
    "wandb": "train.html",
    "multi-node": "tutorials/devices.html",
}
"""Words that readers search for, and a page that they should find."""
browser = pytest.mark.skipif(browse_site.find_chromium() is None, reason="needs Chromium")


def test_find_faults_of_a_good_page_is_empty():
    assert find_faults(GOOD) == []
    assert find_faults(GOOD | {"window": 420, "cut": ["code of 9 in 8: x"]}) == []  # scrolls on a phone


@pytest.mark.parametrize(("change", "fault"), BROKEN.values(), ids=BROKEN)
def test_find_faults_names_each_fault(change, fault):
    assert find_faults(GOOD | change) == [fault]


@pytest.mark.ci
@pytest.mark.parametrize(("term", "page"), TERMS.items(), ids=TERMS)
def test_searched_words_are_on_a_fitting_page(term, page):
    name = page.replace(".html", ".md")
    build = make_pages.list_site_pages().get(f"docs/{name}")
    text = (ROOT / "docs" / name).read_text(encoding="utf-8") if build is None else build()
    assert term in text


def test_browse_raises_without_a_browser(tmp_path, monkeypatch):
    monkeypatch.setattr(browse_site, "PROGRAMS", ("no-such-browser",))
    with pytest.raises(FileNotFoundError, match="none of no-such-browser is on the path"):
        browse(tmp_path)


@browser
@pytest.mark.slow
def test_browse_finds_planted_faults(tmp_path):
    def write(name, body):
        page = f'<html><head></head><body style="margin:0"><div class="md-content">{body}</div></body></html>'
        (tmp_path / f"{name}.html").write_text(page)

    planted = {
        "code": ('<pre style="overflow:auto"><code style="display:block;overflow:auto">' + "x" * 900 + "</code></pre>"),
        "element": '<p style="width: 3000px">x</p>',
        "good": "<p>x</p>",
        "picture": '<img src="gone.png">',
        "script": "<script>undefined_function()</script>",
    }
    for name, body in planted.items():
        write(name, body)
    results = {x["page"].removesuffix(".html"): find_faults(x) for x in browse(tmp_path, widths=(1200,))}
    assert results.keys() == planted.keys() and results["good"] == []
    assert results["code"][0].startswith("cuts off code of ") and len(results["code"]) == 1
    assert results["element"][0] == "is 3000 pixels wide in a window of 1200"
    assert any(x.startswith("picture does not load: http") for x in results["picture"])
    assert results["script"] == ["Uncaught ReferenceError: undefined_function is not defined at the console"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@browser
@pytest.mark.slow
def test_every_page_looks_whole_in_a_browser(site):
    results = browse(site)
    assert len(results) > 100
    assert [f"{x['page']} at {x['window']}: {fault}" for x in results for fault in find_faults(x)] == []
    fitting = [x["columns"] for x in results if x["window"] >= browse_site.WIDE and x["columns"] is not None]
    assert fitting and min(fitting) >= COLUMNS
    pages = ["layout.html", "tutorials/transformer.html"]
    narrow = browse(site, widths=(1220, 1280), pages=pages)  # the menu and the table of contents leave least room
    assert all(x["columns"] >= COLUMNS for x in narrow)


@browser
@pytest.mark.slow
def test_search_finds_a_fitting_page_among_the_first(site):
    results = browse(site, pages=["index.html"], widths=(1440,), search=tuple(TERMS))
    found = {x["words"]: x["found"] for x in results if "words" in x}
    first = {term: list(dict.fromkeys(re.split(r"[?#]", link)[0] for link in found[term]))[:FIRST] for term in TERMS}
    assert {term: pages for term, pages in first.items() if not any(x.endswith(TERMS[term]) for x in pages)} == {}
