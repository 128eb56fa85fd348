"""Load a user-defined `Family` from a Python file."""

import importlib.util
from pathlib import Path

from zoo.models.hf.spec import Family

from .safetensors import CheckpointError


def load_family(path: str | Path) -> Family:
    """Return the one `Family` that a Python file defines. Runs the file, as an import would.

    **Raises** `CheckpointError` if there is no such file, or it does not define exactly one family.
    """
    path = Path(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise CheckpointError(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    defined = {name: x for name, x in vars(module).items() if isinstance(x, Family)}
    if len(defined) != 1:
        listed = f"{len(defined)}: {', '.join(sorted(defined))}" if defined else "none"
        raise CheckpointError(f"{path} should define one zoo.models.Family, and has {listed}")
    return next(iter(defined.values()))
