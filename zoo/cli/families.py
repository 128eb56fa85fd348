"""`zoo families`."""

import shutil
import sys
from types import ModuleType

from zoo.models.hf import families as room
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.spec import Family

from .terminal import align_columns


def families() -> None:
    """List the families of checkpoints: model_type, class in transformers, what it is.

    A family is known by the model_type in a checkpoint's config.json. A terminal shows as much of the last column as
    fits; a pipe gets all of it.
    """
    rows = [(name, FAMILIES[name].architecture, summarize_family(FAMILIES[name])) for name in sorted(FAMILIES)]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in align_columns(rows):
        print(line if width is None or len(line) <= width else line[: width - 3] + "...")


def summarize_family(family: Family) -> str:
    """The first paragraph of the docstring of the file that defines a family."""
    modules = [x for x in vars(room).values() if isinstance(x, ModuleType)]
    holding = [module for module in modules if any(x is family for x in vars(module).values())]
    text = (holding[0].__doc__ or "") if holding else ""
    return " ".join(text.partition("\n\n")[0].split())
