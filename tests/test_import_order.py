"""Import order: a package of the library imports packages of lower levels only.

    shapes, _backend, _checks, _files, _keywords, _optional, _terminal, _workarounds
        < _processes < _compile_cache, ops
        < parallel < layers < models < images < weights, text, audio, generate < adapters, inspect < train < precision
        < tools._figure < tools.plan, tools.draw, tools.report, tools.parity, tools.export, tools.evaluate
        < tools.testing, tools.commands < tools < testing, parity, cli, recipes

Modules of one package may import one another; packages of one level may not. Imports inside functions and under
`TYPE_CHECKING` count, because dependencies matter, not when they are loaded. `zoo/__init__.py` collects the public
names, so it is above every level; of the library's own files only the command line and the recipes may import it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEVELS = (
    ("shapes", "_backend", "_checks", "_files", "_keywords", "_optional", "_terminal", "_workarounds"),
    ("_processes",),
    ("_compile_cache", "ops"),
    ("parallel",),
    ("layers",),
    ("models",),
    ("images",),
    ("weights", "text", "audio", "generate"),
    ("adapters", "inspect"),
    ("train",),
    ("precision",),
    ("tools._figure",),
    ("tools.plan", "tools.draw", "tools.report", "tools.parity", "tools.export", "tools.evaluate"),
    ("tools.testing", "tools.commands"),
    ("tools",),
    ("testing", "parity", "cli", "recipes"),
)
LEVEL = {package: number for number, packages in enumerate(LEVELS) for package in packages}
PUBLIC = LEVEL["cli"]
"""The level from which on the public names of zoo may be imported."""


def find_imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield line and dotted name of every import in a file of `package`, relative names resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, tuple(alias.name.split("."))) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((node.lineno, (*base, alias.name)) for alias in node.names)


def find_package(name: tuple[str, ...]) -> str:
    """Return the package of a dotted name below `zoo`: its second word, or two words of a package of tools."""
    inner = ".".join(name[1:3])
    return inner if inner in LEVEL else name[1]


def find_violations(root: Path) -> list[str]:
    """Return the forbidden imports in `root/zoo` and `root/recipes`, as "file:line: reason"."""
    found = []
    for path in sorted([*root.glob("zoo/**/*.py"), *root.glob("recipes/**/*.py")]):
        file = path.relative_to(root)
        parts = file.with_suffix("").parts
        if parts == ("zoo", "__init__"):
            continue
        package = parts[0] if parts[0] == "recipes" else find_package(parts[:-1] if parts[-1] == "__init__" else parts)
        if package not in LEVEL:
            found.append(f"{file}:1: {package!r} is on no level; add it to one in {Path(__file__).name}")
            continue
        for line, name in find_imports(ast.parse(path.read_text(encoding="utf-8")), parts[:-1]):
            if name[0] == "recipes":
                target = "recipes"
            elif name[0] != "zoo":
                continue
            elif len(name) > 1 and find_package(name) in LEVEL:
                target = find_package(name)
            elif LEVEL[package] < PUBLIC:
                found.append(f"{file}:{line}: {package} imports the public names of zoo, which are above it")
                continue
            else:
                continue
            if target == package or LEVEL[target] < LEVEL[package]:
                continue
            direction = "sideways" if LEVEL[target] == LEVEL[package] else "upward"
            found.append(f"{file}:{line}: {package} imports {'.'.join(name)}, {direction}")
    return found


def test_import_order_of_the_repository():
    found = find_violations(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_adapters_import_at_the_top_of_their_files():
    """An import inside a function would hide a circle: the names of modules lie below the methods that wrap them."""
    found = []
    for path in sorted((ROOT / "zoo/adapters").rglob("*.py")):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        imports = [node for function in functions for node in ast.walk(function)]
        found += [f"{path}:{x.lineno}" for x in imports if isinstance(x, ast.Import | ast.ImportFrom)]
    assert not found, "\n" + "\n".join(found)


PLANTED = {
    "absolute, upward": ("zoo/ops/a.py", "import zoo.layers.linear", 1, "upward"),
    "relative, upward": ("zoo/layers/a.py", "\nfrom ..models import blocks", 2, "upward"),
    "relative, of a package": ("zoo/layers/__init__.py", "from .. import weights", 1, "upward"),
    "from the package": ("zoo/parallel/a.py", "from zoo import layers", 1, "upward"),
    "sideways": ("zoo/adapters/a.py", "from ..inspect.state import state_bytes", 1, "sideways"),
    "sideways, of a file": ("zoo/inspect.py", "from . import adapters", 1, "sideways"),
    "inside a function": ("zoo/ops/a.py", "def f():\n    import zoo.parallel", 2, "upward"),
    "for the type checker": (
        "zoo/models/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..train import data",
        3,
        "upward",
    ),
    "public names": ("zoo/layers/a.py", "import zoo", 1, "public names"),
    "a public name": ("zoo/layers/a.py", "from zoo import make_mesh", 1, "public names"),
    "a recipe": ("zoo/train/a.py", "import recipes.transformer", 1, "upward"),
    "a recipe, from the command line": ("zoo/cli.py", "from recipes import transformer", 1, "sideways"),
    "tools, from the core": ("zoo/train/a.py", "from zoo.tools.report import write", 1, "upward"),
    "one tool from another": ("zoo/tools/plan/a.py", "from ..draw.layout import draw_layout", 1, "sideways"),
    "an unknown package": ("zoo/utils.py", "import jax", 1, "no level"),
}


@pytest.mark.parametrize(("path", "source", "line", "why"), PLANTED.values(), ids=PLANTED)
def test_import_order_finds_a_planted_violation(tmp_path, path, source, line, why):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    (found,) = find_violations(tmp_path)
    assert found.startswith(f"{path}:{line}: ")
    assert why in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "zoo/layers/a.py",
            "from .b import c\nfrom . import d\nfrom ..ops.attention import attend\nimport zoo.parallel",
        ),
        ("zoo/models/__init__.py", "from . import blocks\nfrom .stack import Stack\nfrom ..parallel import Module"),
        ("zoo/__init__.py", "from . import models\nfrom .train import data"),
        ("recipes/a.py", "import zoo\nfrom zoo import train\nfrom zoo.models import Transformer"),
        ("zoo/ops/a.py", "import zoology\nfrom jax import numpy\nimport inspect"),
    ],
)
def test_import_order_passes_what_is_allowed(tmp_path, path, source):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert find_violations(tmp_path) == []
