"""`zoo fork`."""

import ast
import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import tyro

from .terminal import align_columns

_TRAIN_REQUIREMENTS = ("optax", "grain", "orbax.checkpoint")
"""What `zoo.train` needs, which is not imported here: that takes seconds."""


def fork(
    recipe: Annotated[str | None, tyro.conf.Positional] = None,
    target: Annotated[Path | None, tyro.conf.Positional] = None,
    *,
    as_list: Annotated[bool, tyro.conf.arg(name="list")] = False,
    force: bool = False,
) -> None:
    """Copy a recipe: a training program of one file that is yours to change.

    The copy imports nothing but installed packages, so that it runs wherever it lies. Where it speaks of its own name,
    or of the folder of its runs, it has the new name; all else is as it was.

    Args:
        recipe: Which one; --list shows them.
        target: The file to write, or a folder to put it in; a file of the recipe's name, here, unless given.
        as_list: Show the recipes, with what each does.
        force: Replace a file that is there already.
    """
    folder = _find_recipes_folder()
    there = {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}
    if as_list:
        for line in align_columns([(name, _read_first_line(path)) for name, path in there.items()]):
            print(line)
        return
    if recipe is None:
        raise ValueError(f"name a recipe: {', '.join(there)}; `zoo fork --list` says what they do")
    name = recipe.removesuffix(".py").removeprefix("recipes/")
    if name not in there:
        raise ValueError(f"there is no recipe {recipe!r}, but {', '.join(there)}")
    place = _resolve_target(name, target)
    text = _rename_recipe(there[name].read_text(encoding="utf-8"), name, place, others=there.keys() - {name})
    try:
        with place.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{place} exists already: name another file, or say --force to replace it") from None
    print(f"wrote {place}, a copy of the recipe {name}")
    if missing := [
        module for module in _TRAIN_REQUIREMENTS if importlib.util.find_spec(module.partition(".")[0]) is None
    ]:
        print(f'it needs {", ".join(missing)}: pip install "equizoo[train]"')
    for command in [*_find_prerequisite_commands(text, place), f"python {shlex.quote(str(place))} --steps 20"]:
        print(f"next: {command}")


def _find_recipes_folder() -> Path:
    """Beside this package's modules where it was installed from a wheel, else beside the package."""
    package = Path(__file__).parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if any(folder.glob("*.py")):
            return folder
    raise FileNotFoundError(f"{package / 'recipes'}: there are no recipes; is the installation complete?")


def _read_first_line(path: Path) -> str:
    """Of the docstring, without running the file."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _resolve_target(name: str, target: Path | None) -> Path:
    """The file to write.

    **Raises** `ValueError` for a name that is none or that is another module's, `FileNotFoundError` where the folder is
    missing.
    """
    place = Path(f"{name}.py") if target is None else target
    place = place / f"{name}.py" if place.is_dir() else place
    if not re.fullmatch(r"[\w .-]*\w\.py", place.name):
        raise ValueError(
            f"{place.name!r} is no name for a recipe: letters, digits, '_', '-' and '.py', as in my_experiment.py"
        )
    if not place.parent.is_dir():
        raise FileNotFoundError(f"{place.parent}: there is no such folder to write {place.name} to")
    if _is_shadowing_module(place):
        raise ValueError(
            f"{place.name} would hide the module {place.stem!r} from everything that it imports: name it otherwise"
        )
    return place


def _is_shadowing_module(path: Path) -> bool:
    """Whether an import would find this file in place of a module: a program's own folder is looked through first."""
    if not path.stem.isidentifier():
        return False
    if path.stem in sys.stdlib_module_names:
        return path.stem != "test"  # Python's own tests, which nobody imports
    found = importlib.util.find_spec(path.stem)
    return found is not None and found.origin is not None and Path(found.origin) != path.resolve()


def _rename_recipe(text: str, name: str, path: Path, *, others: set[str]) -> str:
    """A recipe's text with its new name: where it says how it is run and where its runs lie. Of other recipes it says
    how they are copied, since they are not there."""
    file = shlex.quote(path.name)
    lines = []
    for line in text.splitlines(keepends=True):
        new = re.sub(rf"\brecipes/{name}\.py\b", lambda _: file, line)
        new = re.sub(rf"\bruns/{name}\b", lambda _: f"runs/{path.stem}", new)
        for other in others:
            new = re.sub(rf"\bpython recipes/{other}\.py\b", f"zoo fork {other} && python {other}.py", new)
            new = re.sub(rf"\brecipes/{other}\.py\b", f"{other}.py (zoo fork {other})", new)
        lines.append(line if new == line else _align_comment(new, line.find("  # ")))
    return "".join(lines)


def _find_prerequisite_commands(text: str, path: Path) -> list[str]:
    """What the docstring runs before the file itself: another recipe, whose result it starts from."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    usage = [line.strip().partition("  # ")[0].rstrip() for line in docstring.splitlines() if line.startswith("    ")]
    own = [command.startswith(f"python {shlex.quote(path.name)}") for command in usage]
    return usage[: own.index(True)] if True in own else []


def _align_comment(line: str, column: int) -> str:
    """The line with its comment where it was, as far as there is room."""
    before, mark, comment = line.partition("  # ")
    if column < 0 or not mark:
        return line
    return before.rstrip().ljust(column) + mark + comment
