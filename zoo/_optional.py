"""Import optional dependencies; if one is missing, say how to install it."""

import importlib
import importlib.util
from types import ModuleType


def import_optional(module: str, install_command: str) -> ModuleType:
    """Import a module by name. **Raises** `ImportError` with `install_command` if that fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"`{module}` cannot be imported ({error}): {install_command}") from error


def require_installed(*modules: str, extra: str) -> None:
    """**Raises** `ImportError` if a module is not installed, with the command that installs this library's `extra`.

    Imports nothing.
    """
    if missing := [module for module in modules if importlib.util.find_spec(module.partition(".")[0]) is None]:
        raise ImportError(f"{' and '.join(missing)} cannot be found: pip install 'equizoo[{extra}]'")
