"""A family of one's own, from a file."""

import importlib.util
from pathlib import Path

from zoo.models.hf.spec import Family

from .safetensors import CheckpointError


def load_family(path: str | Path) -> Family:
    """The one `Family` that a Python file defines. The file is run, as an import would.

    **Raises** `CheckpointError` where there is no such file, or not exactly one family in it.
    """
    path = Path(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise CheckpointError(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {name: x for name, x in vars(module).items() if isinstance(x, Family)}
    if len(found) != 1:
        told = f"{len(found)}: {', '.join(sorted(found))}" if found else "none"
        raise CheckpointError(f"{path} should define one zoo.models.Family, and has {told}")
    return next(iter(found.values()))
