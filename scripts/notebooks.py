"""MkDocs hook: each tutorial is also a notebook, with what its code printed when the site was built.

    python scripts/notebooks.py docs/tutorials/transformer.md transformer.ipynb    # one notebook, in some 20 seconds

The page stays the source, and the test. Blocks of Python become cells; so do `$ zoo ...`, as `!zoo ...`, and exported
variables, as `%env`. All else is text. The code of a page runs in a process of its own, in an empty folder.
"""

import contextlib
import functools
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts.page_code import FENCE, FRONT_MATTER, split_page
from tests.processes import make_environment

TUTORIALS = "tutorials/"
WORKERS = 2
"""Notebooks that run at once."""
INSTALL = 'pip install "equizoo[train,text,tools] @ git+REPOSITORY"'
FIXTURES = "docs/fixtures"
EXPORTS = re.compile(r"(?:export( +\w+=\S+)+\n)+")
"""Code of a shell that only sets variables."""
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\.md([#)])")

log = logging.getLogger("mkdocs.hooks.notebooks")


def build_cells(text: str, repository: str = "") -> list[dict[str, Any]]:
    """Return the cells of a page, without outputs.

    `repository` is the address for the command that installs the library; without one it names the place to fill in.
    """
    cells: list[dict[str, Any]] = []

    def add(kind: str, source: str) -> None:
        source = source.strip("\n")
        if source:
            cell = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": source}
            cells.append(cell | {"outputs": [], "execution_count": None} if kind == "code" else cell)

    def add_prose(source: str) -> None:
        start = 0
        for fence in FENCE.finditer(source):
            if fence["info"] == "bash" and EXPORTS.fullmatch(fence["code"]):
                add("markdown", source[start : fence.start()])
                variables = re.findall(r"\w+=\S+", fence["code"])
                add("code", "\n".join(f"%env {variable}" for variable in variables))
                start = fence.end()
        add("markdown", source[start:])

    for number, part in enumerate(split_page(FRONT_MATTER.sub("", text))):
        if part.kind == "prose":
            source = re.sub(r"<!--.*?-->\n?", "", part.source, flags=re.DOTALL)
            source = LINK.sub(r"](\1.html\2", source)
            if number == 0:
                title, _, rest = source.lstrip("\n").partition("\n")
                source = f"{title}\n\n{_describe_setup(text, repository)}\n{rest}"
            add_prose(source)
        elif part.kind == "python":
            add("code", part.source)
        else:
            add("code", "\n".join(f"!{words}" for _, words in part.list_commands()))
    return cells


def _describe_setup(text: str, repository: str) -> str:
    install = INSTALL.replace("REPOSITORY", repository or "REPOSITORY")
    setup = f"To run this page: `{install}`"
    if FIXTURES in text:
        setup += f", in a checkout of the repository, which has the files in `{FIXTURES}`"
    return f"{setup}.\n"


def run_cells(cells: list[dict[str, Any]]) -> None:
    """Run the code of a notebook in this process, and fill in what it prints.

    What a cell prints is kept as its output. An exception ends the run.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        count += 1
        printed, logged = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(logged):
            _run_cell(cell["source"], f"cell {count}", names)
        cell["execution_count"] = count
        for name, stream in (("stdout", printed), ("stderr", logged)):
            if stream.getvalue():
                cell["outputs"].append({"output_type": "stream", "name": name, "text": stream.getvalue()})


def _run_cell(source: str, title: str, names: dict[str, Any]) -> None:
    if source.startswith("%env "):
        for row in source.splitlines():
            name, _, value = row.removeprefix("%env ").partition("=")
            # keeps the flags with which this process compiles fast; of a flag that comes twice, XLA takes the last
            os.environ[name] = f"{os.environ.get(name, '')} {value}" if name == "XLA_FLAGS" else value
            print(f"env: {name}={value}")
    elif source.startswith("!zoo "):
        for row in source.splitlines():
            _run_command(shlex.split(row)[1:])
    else:
        exec(compile(source, title, "exec", dont_inherit=True), names)


def _run_command(words: list[str]) -> None:
    from zoo.cli import main  # imports JAX, which reads the variables of earlier cells

    try:
        code = main(words) or 0
    except SystemExit as stopped:
        code = stopped.code or 0
    if code:
        raise RuntimeError(f"zoo {shlex.join(words)} ended with {code}")


def format_notebook(cells: list[dict[str, Any]]) -> str:
    """Return a notebook of format 4.5 as JSON."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


@functools.cache  # `mkdocs serve` builds again after each change
def make_notebook(text: str, name: str, repository: str = "") -> str:
    """Return the notebook of a page's text, whose code runs in a process of its own.

    **Raises** `RuntimeError` with the end of the traceback if a cell fails.
    """
    devices = 8 if "xla_force_host_platform_device_count" in text else 1
    environment = make_environment(devices, COLUMNS="100")  # as tests: compiles fast, and on one device into a cache
    with tempfile.TemporaryDirectory() as folder:
        page, out = Path(folder, "page.md"), Path(folder, "page.ipynb")
        page.write_text(text, encoding="utf-8")
        command = [sys.executable, __file__, str(page), str(out), repository]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the notebook of {name} fails:\n{done.stderr[-2000:]}")
        return out.read_text(encoding="utf-8")


def on_files(files, *, config, **_):
    """Add the notebook of each tutorial to the files of the site."""
    from mkdocs.structure.files import File

    pages = [file for file in files if is_tutorial(file.src_uri)]
    make = partial(make_notebook, repository=config["repo_url"] or "")
    with ThreadPoolExecutor(WORKERS) as pool:
        notebooks = list(pool.map(lambda page: make(page.content_string, page.src_uri), pages))
    for page, notebook in zip(pages, notebooks, strict=True):
        path = Path(page.src_uri).with_suffix(".ipynb").as_posix()
        files.append(File.generated(config, path, content=notebook))
    return files


def is_tutorial(path: str) -> bool:
    """Return whether a file of docs/ is the page of a tutorial."""
    return path.startswith(TUTORIALS) and path.endswith(".md")


def on_page_markdown(markdown: str, *, page, **_) -> str:
    """Link a tutorial to its notebook, below its title."""
    if not is_tutorial(page.file.src_uri):
        return markdown
    link = f'[Open as a notebook]({Path(page.file.src_uri).stem}.ipynb){{ .notebook download="" }}'
    title, _, rest = markdown.lstrip("\n").partition("\n")
    return f"{title}\n\n{link}\n{rest}"


def main(page: Path, out: Path, repository: str) -> None:
    """Write the notebook of a page, with its outputs."""
    cells = build_cells(page.read_text(encoding="utf-8"), repository)
    out = out.resolve()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("docs").symlink_to(ROOT / "docs")  # pages read docs/fixtures
        run_cells(cells)
    out.write_text(format_notebook(cells), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), "".join(sys.argv[3:4]))
