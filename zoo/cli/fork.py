"""Implement `zoo fork`."""

import ast
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import tyro

from zoo._files import write_text
from zoo._terminal import align_columns, show

_TRAIN_REQUIREMENTS = ("optax", "grain", "orbax.checkpoint")
"""Dependencies of `zoo.train`, which is not imported here because that takes seconds."""

_PARTS_OF_RECIPES = {
    "dora": "compare_adapters, which ends with its measurements: `zoo fork compare_adapters`, then --methods dora",
    "qlora": "lora: `zoo fork lora`, then --quantization nf4 or int8",
}
"""Words that name a part of a recipe, and how to run it."""


def fork(
    recipe: Annotated[str | None, tyro.conf.Positional] = None,
    target: Annotated[Path | None, tyro.conf.Positional] = None,
    *,
    as_list: Annotated[bool, tyro.conf.arg(name="list")] = False,
    force: bool = False,
) -> None:
    """Copy a recipe, a single-file training program, to edit.

    The copy imports installed packages only, so it runs from any directory. It uses its new name in its commands and
    for its run directory; nothing else changes.

    Args:
        recipe: Name of the recipe; see --list.
        target: Output file or directory. Default: a file of the recipe's name in the current directory.
        as_list: List the recipes, one line each.
        force: Overwrite an existing file.
    """
    folder = _find_recipes_folder()
    recipes = {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}
    if as_list:
        for line in align_columns([(name, _read_first_line(path)) for name, path in recipes.items()]):
            show(line)
        return
    if recipe is None:
        raise ValueError(f"missing the name of a recipe: {', '.join(recipes)}; `zoo fork --list` describes them")
    name = recipe.removesuffix(".py").removeprefix("recipes/")
    if name in _PARTS_OF_RECIPES:
        raise ValueError(f"{name} is part of the recipe {_PARTS_OF_RECIPES[name]}")
    if name not in recipes:
        raise ValueError(f"there is no recipe {recipe!r}: choose from {', '.join(recipes)}")
    path = _resolve_target(name, target)
    text = _rename_recipe(recipes[name].read_text(encoding="utf-8"), name, path, others=recipes.keys() - {name})
    if os.path.lexists(path) and not force:  # a link whose target is missing, too
        raise ValueError(f"{path} exists already: choose another file, or pass --force to overwrite it")
    try:
        write_text(path, text)
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror}): name another, as in `zoo fork {name} /tmp/{name}.py`"
        ) from error
    show(f"wrote {path}, a copy of the recipe {name}")
    if missing := [
        module for module in _TRAIN_REQUIREMENTS if importlib.util.find_spec(module.partition(".")[0]) is None
    ]:
        show(f'it needs {", ".join(missing)}: pip install "equizoo[train,tools]"')
    for command in _find_prerequisite_commands(text, path):
        show(f"next, without a checkpoint of your own: {command}")
    show(f"next: python {shlex.quote(str(path))} --steps 20")


def _find_recipes_folder() -> Path:
    """Return the directory of the recipes: inside the package in a wheel, next to it in a source checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if any(folder.glob("*.py")):
            return folder
    raise FileNotFoundError(f"{package / 'recipes'}: no recipes found; is the installation complete?")


def _read_first_line(path: Path) -> str:
    """Return the first line of a file's docstring without running the file."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _resolve_target(name: str, target: Path | None) -> Path:
    """Return the file to write.

    **Raises** `ValueError` for an invalid name or one that shadows a module, `FileNotFoundError` if its directory is
    missing.
    """
    path = Path(f"{name}.py") if target is None else target
    if path.is_dir():
        path = path / f"{name}.py"
    if not re.fullmatch(r"[\w .-]*\w\.py", path.name):
        raise ValueError(
            f"{path.name!r} is not a valid file name for a recipe: letters, digits, '_' or '-' and '.py', as in "
            "my_experiment.py"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such directory to write {path.name} to")
    if _is_shadowing_module(path):
        raise ValueError(f"{path.name} would shadow the module {path.stem!r} in all imports: choose another name")
    return path


def _is_shadowing_module(path: Path) -> bool:
    """Return True if an import would find this file instead of a module, since a program's directory comes first."""
    if not path.stem.isidentifier():
        return False
    if path.stem in sys.stdlib_module_names:
        return path.stem != "test"  # tests of Python itself, which nobody imports
    found = importlib.util.find_spec(path.stem)
    return found is not None and found.origin is not None and Path(found.origin) != path.resolve()


def _rename_recipe(text: str, name: str, path: Path, *, others: set[str]) -> str:
    """Return a recipe's text with its new name in commands and run directory. Other recipes, which are not next to the
    copy, are named with the command that copies them."""
    file = shlex.quote(path.name)
    lines = []
    for line in text.splitlines(keepends=True):
        new = re.sub(rf"\brecipes/{name}\.py\b", lambda _: file, line)
        new = re.sub(rf"\bruns/{name}\b", lambda _: f"runs/{path.stem}", new)
        for other in others:
            new = re.sub(rf"\bpython recipes/{other}\.py\b", f"zoo fork {other} && python {other}.py", new)
            new = re.sub(rf"\brecipes/{other}\.py\b", f"{other}.py (zoo fork {other})", new)
        if new != line:
            new = _align_comment(new, line.find("  # "))
        lines.append(new)
    return "".join(lines)


def _find_prerequisite_commands(text: str, path: Path) -> list[str]:
    """Return the commands that the docstring runs before the file itself: another recipe, whose checkpoint it loads."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    usage = [line.strip().partition("  # ")[0].rstrip() for line in docstring.splitlines() if line.startswith("    ")]
    own = [command.startswith(f"python {shlex.quote(path.name)}") for command in usage]
    if True not in own:
        return []
    return usage[: own.index(True)]


def _align_comment(line: str, column: int) -> str:
    """Keep the line's comment in its column if there is room."""
    before, mark, comment = line.partition("  # ")
    if column < 0 or not mark:
        return line
    return before.rstrip().ljust(column) + mark + comment
