"""Each tutorial is a notebook too: the page's code in its order, with what it prints."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import notebooks
from scripts.page_code import list_code, split_page

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGE = """# A title

Prose with [a link](../layout.md#axes).

```bash
export ZOO_TEST_A=1 ZOO_TEST_B=two
```

<!-- no-run: it needs PyTorch -->
```python
import torch
```

```python title="JAX"
import os
print(os.environ["ZOO_TEST_B"])
```

```console
$ zoo families
```

```bash
python recipes/transformer.py
```
"""


def read_sources(cells, kind="code"):
    return [cell["source"] for cell in cells if cell["cell_type"] == kind]


def test_cells_are_the_parts_of_a_page():
    cells = notebooks.build_cells(PAGE, "https://example.org/zoo")
    assert read_sources(cells) == [
        "%env ZOO_TEST_A=1\n%env ZOO_TEST_B=two",
        'import os\nprint(os.environ["ZOO_TEST_B"])',
        "!zoo families",
    ]
    first, second, last = read_sources(cells, "markdown")
    assert first.startswith("# A title\n\nTo run this page: `pip install ")
    assert "git+https://example.org/zoo" in first and "[a link](../layout.html#axes)" in first
    assert second == "```python\nimport torch\n```"
    assert last == "```bash\npython recipes/transformer.py\n```"
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_run_keeps_what_cells_print(monkeypatch):
    monkeypatch.setenv("ZOO_TEST_A", "0")
    monkeypatch.setenv("ZOO_TEST_B", "0")
    cells = notebooks.build_cells(PAGE)
    notebooks.run_cells(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [1, 2, 3]
    printed = [cell["outputs"][0]["text"] for cell in code]
    assert printed[:2] == ["env: ZOO_TEST_A=1\nenv: ZOO_TEST_B=two\n", "two\n"]
    assert "LlamaForCausalLM" in printed[2]


def test_a_cell_that_fails_ends_the_run():
    with pytest.raises(ZeroDivisionError):
        notebooks.run_cells(notebooks.build_cells("# A title\n```python\n1 / 0\n```\n"))
    with pytest.raises(RuntimeError, match="zoo info missing ended with"):
        notebooks.run_cells(notebooks.build_cells("# A title\n```console\n$ zoo info missing\n```\n"))
    with pytest.raises(RuntimeError, match=r"(?s)notebook of page\.md fails:.*ZeroDivisionError"):
        notebooks.make_notebook("# A title\n```python\n1 / 0\n```\n", "page.md")


def test_tutorials_link_to_their_notebooks():
    def link(path):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=path))
        return notebooks.on_page_markdown("# A title\n\nProse.\n", page=page)

    assert link("train.md") == "# A title\n\nProse.\n"
    assert link("tutorials/devices.md").splitlines()[:3] == [
        "# A title",
        "",
        '[Open as a notebook](devices.ipynb){ .notebook download="" }',
    ]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_cells_hold_all_code_of_a_tutorial(page):
    text = page.read_text(encoding="utf-8")
    parts = [part for part in split_page(text) if part.kind != "prose"]
    code = [source for source in read_sources(notebooks.build_cells(text)) if not source.startswith("%env")]
    assert len(code) == len(parts) > 5
    assert [source for source in code if not source.startswith("!")] == [
        part.source.strip("\n") for part in parts if part.kind == "python"
    ]
    assert sum(source.count("!zoo ") for source in code) == sum("command(" in source for _, source in list_code(text))


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_notebooks_of_the_built_site(built, page):
    path = built / "tutorials" / f"{page.stem}.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.reads(path.read_text(encoding="utf-8"), as_version=4))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    wanted = notebooks.build_cells(page.read_text(encoding="utf-8"))
    assert [cell["source"] for cell in code] == read_sources(wanted)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["outputs"] for cell in code if "print(" in cell["source"] and "def " not in cell["source"])
    assert any(cell["outputs"] for cell in code)
    assert f'href="{page.stem}.ipynb"' in path.with_suffix(".html").read_text(encoding="utf-8")
