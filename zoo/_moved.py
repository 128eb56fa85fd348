"""Names that have moved: for one release, their old path raises with the new one."""

from collections.abc import Callable, Mapping
from typing import Any


def explain_moved_names(module: str, moved: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module, which raises `ImportError` with the new path of each name in `moved`.

    Not an `AttributeError`, whose words `from module import name` would drop.
    """

    def __getattr__(name: str) -> Any:
        if name in moved:
            raise ImportError(f"{module}.{name} has moved to {moved[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
