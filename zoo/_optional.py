"""Packages that only some runs need: imported where they are used, and missed in words that help."""

import importlib
import importlib.util
from types import ModuleType


def import_optional(module: str, install_command: str) -> ModuleType:
    """The module of that name. **Raises** `ImportError` with the `command` that installs it where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"`{module}` cannot be imported ({error}): {install_command}") from error


def require_installed(*modules: str, extra: str) -> None:
    """**Raises** `ImportError` where one of the modules is not installed, with the command that installs the `extra` of
    this library that brings them. Nothing is imported."""
    if missing := [module for module in modules if importlib.util.find_spec(module.partition(".")[0]) is None]:
        raise ImportError(f"{' and '.join(missing)} cannot be found: pip install 'equizoo[{extra}]'")
