"""Generate the files of the documentation that follow from the code: pages of the site, pictures, tested families.

    python scripts/make_pages.py            # writes the files that changed
    python scripts/make_pages.py --check    # lists stale files of the repository, and fails if there are any

A test makes the same check of the files in the repository. Git ignores the pages, which `make docs` writes anew.
"""

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tyro

from scripts.api_pages import build_api_pages, list_packages, list_public_names, locate, resolve_name
from scripts.draw_layer import draw
from scripts.families_page import build_families_page, build_support
from zoo.parallel import Schedule
from zoo.parallel.devices import make_abstract_mesh, use_cpu
from zoo.tools.draw import draw_schedule

ROOT = Path(__file__).parents[1]
COMMAND = "python scripts/make_pages.py"
FOLDERS = ("zoo", "recipes", "scripts")
FOLDER_CAPTIONS = {
    "attack": "Programs that damage files and stop runs, and count what came of it.",
    "recipes": "Complete programs in one file, to fork.",
    "scripts": "Tools around the library.",
}
"""Captions of folders that are not packages."""
HEAD = "---\nsearch:\n  exclude: true\n---\n\n"
"""Front matter of lists whose entries the search finds in the API."""
NOTE = f"<!-- Written by `{COMMAND}`. -->\n\n"


def build_tree_page() -> str:
    """List every file with the first paragraph of its docstring, and every folder with that of its `__init__`."""

    def listing(folder: Path, depth: int) -> Iterator[str]:
        yield f"{'    ' * depth}- **`{folder.name}/`** {read_caption(folder)}".rstrip()
        inner = sorted({path.relative_to(folder).parts[0] for path in folder.glob("**/*.py")})
        files = [folder / name for name in inner if name.endswith(".py") and name != "__init__.py"]
        for path in sorted(path for name in inner if (path := folder / name).is_dir()):
            yield from listing(path, depth + 1)
        yield from (f"{'    ' * (depth + 1)}- `{path.name}` {read_caption(path)}" for path in files)

    rows = "\n".join(row for name in FOLDERS for row in listing(ROOT / name, 0))
    return (
        f"{HEAD}# The tree\n\n{NOTE}Every file with the first paragraph of its docstring. `zoo/tools` plans, draws, "
        "compares and reports; the core, which trains, loads and adapts models, never imports it. Imports go down "
        "only, `ops < ... < cli`: `tests/test_import_order.py` has the order.\n\n"
        f'<div class="tree" markdown>\n\n{rows}\n\n</div>\n'
    )


def read_caption(path: Path) -> str:
    """Return the first paragraph of the docstring of a file or package.

    **Raises** `ValueError` for a file without a docstring.
    """
    if path.is_dir() and path.name in FOLDER_CAPTIONS:
        return FOLDER_CAPTIONS[path.name]
    file = path / "__init__.py" if path.is_dir() else path
    module = ast.parse(file.read_text(encoding="utf-8"))
    text = first_paragraph(ast.get_docstring(module))
    if not text:
        raise ValueError(f"{file.relative_to(ROOT)} has no docstring: describe it in its first line")
    if command := re.fullmatch(
        r"(?:Implement )?(`zoo[ .](\w+)`)\.", text
    ):  # a file of one function, which has the description
        body = [x for x in module.body if isinstance(x, ast.FunctionDef) and x.name == command[2]]
        text = " ".join([f"{command[1]}:", *(first_paragraph(ast.get_docstring(x)) for x in body)])
    return text


def first_paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").partition("\n\n")[0].split())


def build_names_page() -> str:
    """List every public name with its arguments and the first sentence of its docstring."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    promises = changes.partition("## Promised names")[2].partition("\n## ")[0]
    promised = [f"zoo.{name}" for name in re.findall(r"`zoo\.([a-z]\w*(?:\.\w+)*)`", promises)]
    listed = {id(resolve_name(name)) for name in promised}
    found = [
        f"{HEAD}# Public names\n\n{NOTE}Each with its arguments and the first sentence of its docstring. Follow the "
        "name for the rest.\n",
        '<div class="names" markdown>\n',
        "## Promised\n\nThese keep their names and their meaning.\n",
        *map(format_entry, promised),
    ]
    for package in list_packages():
        rest = [name for name in list_public_names(package) if id(resolve_name(name)) not in listed]
        listed |= {id(resolve_name(name)) for name in rest}
        found += [f"\n## {package.__name__}\n\n{first_paragraph(package.__doc__)}\n", *map(format_entry, rest)]
    return "\n".join([*found, "\n</div>\n"])


def format_entry(name: str) -> str:
    value = resolve_name(name)
    if not inspect.isroutine(value) and not isinstance(value, type):
        return f"- {format_link(name, value)}"
    sentence = re.match(r".*?\.(?=\s+[A-Z`*]|$)|.*", first_paragraph(value.__doc__))
    call = f"`({format_arguments(value)})`" if is_called(value) else ""
    return f"- {format_link(name, value)}{call}  \n  {sentence[0] if sentence else ''}".rstrip()


def is_called(value: Any) -> bool:
    """Return True if readers call it: abstract classes and protocols are derived from, exceptions are caught."""
    is_exception = isinstance(value, type) and issubclass(value, BaseException)
    return not is_exception and not inspect.isabstract(value) and not getattr(value, "_is_protocol", False)


def format_link(name: str, value: Any) -> str:
    """Link a name to its place in the API reference, if it has one."""
    place = locate(name, value)
    return f"[`{name}`]({place})" if place else f"`{name}`"


def format_arguments(value: Any) -> str:
    """Format a signature without types: names and plain defaults."""
    arguments, starred = [], False
    for argument in inspect.signature(value).parameters.values():
        if argument.kind is argument.KEYWORD_ONLY and not starred:
            arguments.append("*")
        starred |= argument.kind in (argument.KEYWORD_ONLY, argument.VAR_POSITIONAL)
        arguments.append(f"{STARS.get(argument.kind, '')}{argument.name}{format_default(argument.default)}")
    return ", ".join(arguments)


STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def format_default(value: Any) -> str:
    """Format a default as `=value`, or as `=...` if its `repr` depends on versions of Python and its libraries."""
    if value is inspect.Parameter.empty:
        return ""
    parts = value if isinstance(value, tuple) else (value,)
    plain = all(part is None or isinstance(part, bool | int | float | str) for part in parts)
    return f"={value!r}" if plain else f"={getattr(value, '__name__', '...')}"


def list_site_pages() -> dict[str, Callable[[], str]]:
    """Return the path of each page that only the site has, and the function that builds its text."""
    return {
        **{path: functools.partial(str, text) for path, text in build_api_pages(NOTE).items()},
        "docs/families.md": functools.partial(build_families_page, NOTE),
        "docs/names.md": build_names_page,
        "docs/tree.md": build_tree_page,
        **list_pipelines(),
    }


def list_pipelines() -> dict[str, Callable[[], str]]:
    """Return the path of each picture of a pipeline, and the function that draws it: the bytes depend on matplotlib's
    version."""

    def draw_pipeline(name: str, rounds: int, width: int) -> str:
        return draw_schedule(Schedule(name).table(stages=4, microbatches=8, rounds=rounds), width=width)

    schedules = {"gpipe": ("gpipe", 1), "1f1b": ("1f1b", 1), "interleaved": ("1f1b", 2)}
    return {
        f"docs/pictures/pipelines/{title}{suffix}.svg": functools.partial(draw_pipeline, name, rounds, width)
        for title, (name, rounds) in schedules.items()
        for suffix, width in {"": 860, "-narrow": 360}.items()
    }


def list_repository_files() -> dict[str, Callable[[], str]]:
    """Return the path of each generated file in the repository, and the function that builds its text."""

    def picture(narrow: bool) -> str:
        mesh = make_abstract_mesh(data=1, fsdp=2, tensor=4)
        assert mesh is not None
        return draw(mesh, embed=64, heads=8, kv_heads=4, mlp=128, device=5, narrow=narrow)

    return {
        "zoo/models/hf/support.json": build_support,
        "docs/pictures/layer.svg": functools.partial(picture, False),
        "docs/pictures/layer-narrow.svg": functools.partial(picture, True),
    }


def find_stale(files: dict[str, Callable[[], str]]) -> dict[str, str]:
    """Return the path and the current text of each file that is out of date."""
    current = {path: build() for path, build in files.items()}

    def read(path: str) -> str:
        return (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""

    return {path: text for path, text in current.items() if read(path) != text}


def write_stale(files: dict[str, Callable[[], str]]) -> list[str]:
    """Write the files that are out of date, and return their paths."""
    stale = find_stale(files)
    for path, text in stale.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
    return list(stale)


def main(*, check: bool = False) -> None:
    """Write the generated files that are out of date.

    Args:
        check: Write nothing; list the stale files of the repository, and fail if there are any.
    """
    use_cpu()
    if not check:
        for path in write_stale({**list_repository_files(), **list_site_pages()}):
            print(f"{path} written")
        return
    stale = find_stale(list_repository_files())
    for path in stale:
        print(f"{path} is stale")
    if stale:
        sys.exit(f"`{COMMAND}` updates them.")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
