"""Imports go down only: each room of the library stands on a floor and may use the floors below it.

    shapes, _files, _optional, _workarounds < ops < parallel < layers < models < weights, text
        < adapters, train, generate, inspect < cli, recipes

Files of one room may import one another; rooms of one floor may not. Imports inside functions and under
`TYPE_CHECKING` count like any other, because what matters is who must know of whom. `zoo/__init__.py` collects the
public names, so it stands above every floor; of the library's own files only the command line and the recipes may
import it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (
    ("shapes", "_files", "_optional", "_workarounds"),
    ("ops",),
    ("parallel",),
    ("layers",),
    ("models",),
    ("weights", "text"),
    ("adapters", "train", "generate", "inspect"),
    ("cli", "recipes"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
TOP = len(FLOORS) - 1


def imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and dotted name of everything that a file of `package` imports, relative names resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, tuple(alias.name.split("."))) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((node.lineno, (*base, alias.name)) for alias in node.names)


def violations(root: Path) -> list[str]:
    """What breaks the rule in `root/zoo` and `root/recipes`, as "file:line: why"."""
    found = []
    for path in sorted([*root.glob("zoo/**/*.py"), *root.glob("recipes/**/*.py")]):
        place = path.relative_to(root)
        parts = place.with_suffix("").parts
        if parts == ("zoo", "__init__"):
            continue
        room = parts[0] if parts[0] == "recipes" else parts[1].removesuffix(".py")
        if room not in FLOOR:
            found.append(f"{place}:1: the room {room!r} stands on no floor; give it one in {Path(__file__).name}")
            continue
        for line, name in imported(ast.parse(path.read_text(encoding="utf-8")), parts[:-1]):
            if name[0] == "recipes":
                target = "recipes"
            elif name[0] != "zoo":
                continue
            elif len(name) > 1 and name[1] in FLOOR:
                target = name[1]
            elif FLOOR[room] < TOP:
                found.append(f"{place}:{line}: {room} imports the public names of zoo, which stand above it")
                continue
            else:
                continue
            if target == room or FLOOR[target] < FLOOR[room]:
                continue
            how = "sideways" if FLOOR[target] == FLOOR[room] else "upward"
            found.append(f"{place}:{line}: {room} imports {'.'.join(name)}, {how}")
    return found


def test_imports_go_down_only():
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


PLANTED = {
    "absolute, upward": ("zoo/ops/a.py", "import zoo.layers.linear", 1, "upward"),
    "relative, upward": ("zoo/layers/a.py", "\nfrom ..models import blocks", 2, "upward"),
    "relative, of a package": ("zoo/layers/__init__.py", "from .. import weights", 1, "upward"),
    "from the package": ("zoo/parallel/a.py", "from zoo import layers", 1, "upward"),
    "sideways": ("zoo/train/a.py", "from ..adapters.lora import wrap", 1, "sideways"),
    "sideways, of a file": ("zoo/generate.py", "from . import inspect", 1, "sideways"),
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
    "an unknown room": ("zoo/utils.py", "import jax", 1, "no floor"),
}


@pytest.mark.parametrize(("path", "source", "line", "why"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_is_found(tmp_path, path, source, line, why):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    (found,) = violations(tmp_path)
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
def test_what_is_allowed_passes(tmp_path, path, source):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert violations(tmp_path) == []
