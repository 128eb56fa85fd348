"""Run every block of Python in the README and the documentation, and every `$ zoo ...` in a console block.

The blocks of one page share a namespace, in order. A block marked `python no-run` is skipped, and needs a comment
on the line above it: `<!-- no-run: why -->`. Commands in a block marked `console fails` must fail.
"""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^( *)(`{3,})(?P<info>[^\n`]*)\n(?P<code>.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
WHY = re.compile(r"<!-- no-run: \S.*-->\s*$")


def blocks(text: str) -> list[tuple[int, str]]:
    """Return the first line and the source of each block to run; commands as the Python that runs them."""
    found = []
    for fence in FENCE.finditer(text):
        language, *marks = fence["info"].replace("{", " ").replace("}", " ").split() or [""]
        line = text.count("\n", 0, fence.start("code")) + 1
        if language == "console":
            words = [shlex.split(row)[1:] for row in fence["code"].splitlines() if row.strip().startswith("$ zoo")]
            found += [(line + i, f"command({row[1:]}, {'fails' in marks})\n") for i, row in enumerate(words)]
            continue
        if language not in ("python", "py", "python3", ".python"):
            continue
        if "no-run" in marks:
            assert WHY.search(text[: fence.start()]), f"line {line - 1}: no-run without `<!-- no-run: why -->` above it"
            continue
        indent = len(fence[1])
        found.append((line, "".join(row[indent:] or "\n" for row in fence["code"].splitlines(keepends=True))))
    return found


def command(words: list[str], fails: bool) -> None:
    """Run `zoo WORDS`, and check that it fails if, and only if, it should."""
    from zoo.cli import main

    try:
        code = main(words) or 0
    except SystemExit as stopped:
        code = stopped.code or 0
    assert bool(code) == fails, f"zoo {shlex.join(words)} ended with {code}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")  # commands run in the repository
    names = {"__name__": "__main__", "command": command}
    for line, source in blocks(page.read_text(encoding="utf-8")):
        # Empty lines in front give the traceback, and a failing assertion, the page's own line numbers.
        exec(compile("\n" * (line - 1) + source, str(page), "exec", dont_inherit=True), names)


def test_blocks_finds_python_and_console():
    page = "a\n```python\nx = 1\n\ny = x\n```\n\n    ```py title='b'\n    z = 2\n    ```\n```text\nno\n```\n"
    assert blocks(page) == [(3, "x = 1\n\ny = x\n"), (9, "z = 2\n")]
    assert blocks("```console fails\n$ zoo info 'a b'\nx\n```\n") == [(2, "command(['info', 'a b'], True)\n")]
    assert blocks("<!-- no-run: it needs a GPU -->\n```python no-run\nx\n```\n") == []
    with pytest.raises(AssertionError, match="line 1: no-run"):
        blocks("```python no-run\nx\n```\n")
