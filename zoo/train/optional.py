"""Packages that only some runs need: imported where they are used, and missed in words that help."""

import importlib
from types import ModuleType


def require(module: str, command: str) -> ModuleType:
    """The module of that name. **Raises** `ImportError` with the `command` that installs it where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"`{module}` cannot be imported ({error}): {command}") from error
