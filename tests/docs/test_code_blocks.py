"""Run every block of Python in the README and the documentation, and every `$ zoo ...` in a console block.

The blocks of one page share a namespace, in order. A block of Python below `<!-- no-run: why -->` is skipped; commands
below `<!-- fails: why -->` must fail. A mark in the info string is an error: the site would not render the block.
"""

import re
import shlex
from pathlib import Path

import jax
import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FOR_EIGHT_DEVICES = (
    *("README.md", "docs/ideas.md", "docs/layout.md", "docs/parallelism.md", "docs/pipelines.md", "docs/profile.md"),
    *("docs/add-a-layer.md", "docs/tutorials/devices.md"),
)
"""Pages that ask for eight devices, or are about them."""
FENCE = re.compile(r"^( *)(`{3,})(?P<info>[^\n`]*)\n(?P<code>.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (no-run|fails)\b(?P<reason>.*?)-->\s*$")


def blocks(text: str) -> list[tuple[int, str]]:
    """Return the first line and the source of each block to run; commands as the Python that runs them."""
    found = []
    for fence in FENCE.finditer(text):
        language, *options = fence["info"].split() or [""]
        line = text.count("\n", 0, fence.start("code")) + 1
        assert all("=" in option for option in options), (
            f"line {line - 1}: the site renders no fence of {fence['info']!r}"
        )
        mark = MARK.search(text[: fence.start()])
        assert mark is None or re.match(r": \S", mark["reason"]), (
            f"line {line - 1}: `<!-- {mark[1]}: why -->` needs a why"
        )
        if language == "console":
            commands = [shlex.split(row)[1:] for row in fence["code"].splitlines() if row.strip().startswith("$ zoo")]
            fails = mark is not None and mark[1] == "fails"
            found += [(line + i, f"command({words[1:]}, {fails})\n") for i, words in enumerate(commands)]
        elif language in ("python", "py", "python3") and not (mark and mark[1] == "no-run"):
            indent = len(fence[1])
            source = "".join(row[indent:] or "\n" for row in fence["code"].splitlines(keepends=True))
            found.append((line, source))
    return found


def command(words: list[str], fails: bool) -> None:
    """Run `zoo WORDS`, and check that it fails if, and only if, it should."""
    from zoo.cli import main

    try:
        code = main(words) or 0
    except SystemExit as stopped:
        code = stopped.code or 0
    assert bool(code) == fails, f"zoo {shlex.join(words)} ended with {code}"


def list_cases():
    """Each page, on one device as most readers have; where it says so on eight, and the others on eight too if slow."""
    for page in PAGES:
        name, code = str(page.relative_to(ROOT)), blocks(page.read_text(encoding="utf-8"))
        if name in FOR_EIGHT_DEVICES:
            yield pytest.param(page, 8, id=name)
            continue
        yield pytest.param(page, 1, id=name)
        if any("mesh" in source for _, source in code):
            yield pytest.param(page, 8, id=f"{name} on eight devices", marks=pytest.mark.slow)


@pytest.mark.parametrize("page, devices", list(list_cases()))
def test_page_runs(page, devices, tmp_path, monkeypatch, no_type_checks):
    """As readers run them, who have no checks of annotations."""
    show_devices(monkeypatch, devices)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")  # commands run in the repository
    names = {"__name__": "__main__", "command": command}
    for line, source in blocks(page.read_text(encoding="utf-8")):
        # Empty lines in front give the traceback, and a failing assertion, the page's own line numbers.
        exec(compile("\n" * (line - 1) + source, str(page), "exec", dont_inherit=True), names)


def show_devices(monkeypatch, count):
    """Let JAX list so many of the emulated devices."""
    for name in ("devices", "local_devices"):
        listed = getattr(jax, name)
        monkeypatch.setattr(jax, name, lambda *args, listed=listed, **options: listed(*args, **options)[:count])
        monkeypatch.setattr(jax, f"{name.removesuffix('s')}_count", lambda *args: count)


def test_blocks_finds_python_and_console():
    page = "a\n```python\nx = 1\n\ny = x\n```\n\n    ```py title='b'\n    z = 2\n    ```\n```text\nno\n```\n"
    assert blocks(page) == [(3, "x = 1\n\ny = x\n"), (9, "z = 2\n")]
    console = "```console\n$ zoo info 'a b'\nx\n```\n"
    assert blocks(console) == [(2, "command(['info', 'a b'], False)\n")]
    assert blocks(f"<!-- fails: no such model -->\n{console}") == [(3, "command(['info', 'a b'], True)\n")]
    assert blocks("<!-- no-run: it needs a GPU -->\n```python\nx\n```\n") == []


def test_blocks_rejects_marks_without_a_reason_or_in_the_fence():
    with pytest.raises(AssertionError, match="line 2: .* needs a why"):
        blocks("<!-- no-run -->\n```python\nx\n```\n")
    with pytest.raises(AssertionError, match="line 1: the site renders no fence of 'python no-run'"):
        blocks("```python no-run\nx\n```\n")
