"""Run every block of Python in the README and the documentation, and every `$ zoo ...` in a console block. The build of
the site runs the tutorials, for their notebooks.

The blocks of one page share a namespace, in order. A block of Python below `<!-- no-run: why -->` is skipped; commands
below `<!-- fails: why -->` must fail. A mark in the info string is an error: the site would not render the block.
"""

import shlex
from pathlib import Path

import jax
import pytest

import zoo
from scripts.page_code import list_code
from tests.pictures import write_gemma3, write_picture

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FOR_EIGHT_DEVICES = (
    *("README.md", "docs/add-a-layer.md", "docs/export.md", "docs/ideas.md", "docs/layout.md", "docs/long-context.md"),
    *("docs/parallelism.md", "docs/pipelines.md", "docs/profile.md", "docs/read-a-program.md", "docs/residuals.md"),
)
"""Pages that ask for eight devices, or are about them."""
RUN_BY_OTHER_TESTS = ("docs/look-inside.md",)
"""Pages that train a checkpoint between their blocks of Python: tests/docs/test_look_inside.py."""
HUB_NAME = "Qwen/Qwen3-0.6B"
SEEING_NAME = "google/gemma-3-4b-it"


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
        name, code = str(page.relative_to(ROOT)), list_code(page.read_text(encoding="utf-8"))
        if name in RUN_BY_OTHER_TESTS or name.startswith("docs/tutorials/"):
            continue
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
    if f'"{HUB_NAME}"' in page.read_text(encoding="utf-8"):
        save_model_of_the_hub(tmp_path / HUB_NAME)  # a folder of that name comes before the hub
    if f'"{SEEING_NAME}"' in page.read_text(encoding="utf-8"):
        write_gemma3(tmp_path / SEEING_NAME)
        write_picture(tmp_path / "cat.png")
    names = {"__name__": "__main__", "command": command}
    for line, source in list_code(page.read_text(encoding="utf-8")):
        # Empty lines in front give the traceback, and a failing assertion, the page's own line numbers.
        exec(compile("\n" * (line - 1) + source, str(page), "exec", dont_inherit=True), names)


def save_model_of_the_hub(folder):
    """Write a small Qwen3, with the ids that pages take from the vocabulary of Qwen3-0.6B."""
    config = {"vocab_size": 10_000, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    zoo.save(zoo.models.preset("qwen3-0.6b", key=jax.random.key(0), **config, **heads), folder)


def show_devices(monkeypatch, count):
    """Let JAX list so many of the emulated devices."""
    for name in ("devices", "local_devices"):
        listed = getattr(jax, name)
        monkeypatch.setattr(jax, name, lambda *args, listed=listed, **options: listed(*args, **options)[:count])
        monkeypatch.setattr(jax, f"{name.removesuffix('s')}_count", lambda *args: count)


def test_code_is_python_and_commands():
    page = "a\n```python\nx = 1\n\ny = x\n```\n\n    ```py title='b'\n    z = 2\n    ```\n```text\nno\n```\n"
    assert list_code(page) == [(3, "x = 1\n\ny = x\n"), (9, "z = 2\n")]
    console = "```console\n$ zoo info 'a b'\nx\n```\n"
    assert list_code(console) == [(2, "command(['info', 'a b'], False)\n")]
    assert list_code(f"<!-- fails: no such model -->\n{console}") == [(3, "command(['info', 'a b'], True)\n")]
    long = "```console\n$ zoo info \\\n    'a b'\nx\n$ zoo plan\n```\n"
    assert list_code(long) == [(2, "command(['info', 'a b'], False)\n"), (5, "command(['plan'], False)\n")]
    assert list_code("<!-- no-run: it needs a GPU -->\n```python\nx\n```\n") == []


def test_marks_without_a_reason_or_in_the_fence_are_rejected():
    with pytest.raises(ValueError, match="line 2: .* needs a why"):
        list_code("<!-- no-run -->\n```python\nx\n```\n")
    with pytest.raises(ValueError, match="line 1: the site renders no fence of 'python no-run'"):
        list_code("```python no-run\nx\n```\n")
