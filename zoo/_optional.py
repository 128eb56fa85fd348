"""Import optional dependencies; if one is missing, say how to install it."""

import importlib
import importlib.util
import sys
from types import ModuleType, TracebackType


class MissingExtraError(ImportError):
    """Packages of one of this library's extras are not installed."""


def import_optional(module: str, install_command: str) -> ModuleType:
    """Import a module by name. **Raises** `ImportError` with `install_command` if that fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"`{module}` cannot be imported ({error}): {install_command}") from error


def require_installed(*modules: str, extra: str) -> None:
    """**Raises** `ImportError` if a module is not installed, with the command that installs this library's `extra`.

    Imports nothing. A program that does not catch the error, as a recipe cannot that imports `zoo.train` at its top,
    ends with one line and status 2.
    """
    if missing := [module for module in modules if importlib.util.find_spec(module.partition(".")[0]) is None]:
        sys.excepthook = _print_missing_extra
        raise MissingExtraError(f"{' and '.join(missing)} cannot be found: pip install 'equizoo[{extra}]'")


def _print_missing_extra(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    if issubclass(kind, MissingExtraError):
        sys.__excepthook__(ImportError, ImportError(str(error)), None)
        sys.exit(2)
    sys.__excepthook__(kind, error, at)
