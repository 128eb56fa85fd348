"""Load a user-defined `Family` from a Python file."""

from pathlib import Path
from typing import Any

from zoo.models.hf.spec import Family

from .safetensors import CheckpointError


def load_family(path: str | Path) -> Family:
    """Return the one `Family` that a Python file defines. Runs the file, as an import would.

    **Raises** `CheckpointError` if there is no such file, or it does not define exactly one family.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no Python file {path}")
    # Compiled anew: an import takes an old .pyc if a file of the same size was written within the same second.
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(path.read_bytes(), str(path), "exec"), names)
    defined = {name: x for name, x in names.items() if isinstance(x, Family)}
    if len(defined) != 1:
        listed = f"{len(defined)}: {', '.join(sorted(defined))}" if defined else "none"
        raise CheckpointError(f"{path} should define one zoo.models.hf.grammar.Family, and has {listed}")
    return next(iter(defined.values()))
