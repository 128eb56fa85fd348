"""Implement `zoo families`."""

import shutil
import sys
from types import ModuleType

from zoo._terminal import align_columns, show
from zoo.models.hf import families as families_package
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.families import families as find_families
from zoo.models.hf.spec import Family


def families() -> None:
    """List supported model families: model_type, class in transformers, what is tested, description.

    A checkpoint's family is the model_type in its config.json. Lines are cut to the width of the terminal; a pipe gets
    all of them.
    """
    support = find_families()
    rows = [(name, f.architecture, str(support[name]), summarize_family(f)) for name, f in sorted(FAMILIES.items())]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in align_columns(rows):
        if width is not None and len(line) > width:
            line = line[: width - 3] + "..."
        show(line)


def summarize_family(family: Family) -> str:
    """Return the first paragraph of the docstring of the module that defines a family."""
    modules = [x for x in vars(families_package).values() if isinstance(x, ModuleType)]
    defining = [module for module in modules if any(x is family for x in vars(module).values())]
    text = next((module.__doc__ for module in defining), None) or ""
    return " ".join(text.partition("\n\n")[0].split())
