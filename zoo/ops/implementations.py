"""Implementations of an operation: which exist, which one a request gets, and why the others are passed over.

An operation that has several implementations, such as attention, lists them in one `Operation`. For a request (shapes,
dtypes, options, platform) each reports an obstacle, if it cannot compute the request, and a drawback, if another
implementation is the better choice. `"auto"` takes the first one that has neither.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from jax.errors import InconclusiveDimensionOperation

from .platform import Platform, current_platform, for_export

_Request = TypeVar("_Request")

AUTO = "auto"
"""The name that stands for the first implementation without an obstacle or a drawback."""


class ObstacleError(ValueError):
    """Raised if the implementation that was named cannot compute a request."""


def _find_nothing(request: Any) -> None:
    """Return None: no obstacle, or no drawback."""


@dataclasses.dataclass(frozen=True)
class Implementation(Generic[_Request]):
    """One implementation of an operation."""

    name: str
    function: Callable
    find_obstacle: Callable[[_Request], str | None] = _find_nothing
    """Return why it cannot compute a request, or None. The reason follows "because": "the scores have a soft cap"."""
    find_drawback: Callable[[_Request], str | None] = _find_nothing
    """Return why `"auto"` passes it over for a request, or None."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One line of `Operation.explain`."""

    name: str
    is_chosen: bool
    reason: str | None
    """Why `"auto"` does not choose it; None for the chosen one and the ones after it."""
    is_possible: bool
    """False if there is an obstacle: then it cannot be chosen by name either."""


@dataclasses.dataclass(frozen=True)
class Operation(Generic[_Request]):
    """An operation and its implementations, in the order in which `"auto"` tries them."""

    name: str
    implementations: tuple[Implementation[_Request], ...]
    kind: str = ""
    """Name that several operations share and `zoo.set_implementations` takes: "recurrence"."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names that `select` takes."""
        return (AUTO, *(implementation.name for implementation in self.implementations))

    def check_name(self, name: str) -> None:
        """Check a name. **Raises** `ValueError` if it is not one of `names`."""
        if name not in self.names:
            raise ValueError(f"{self.name} has no implementation {name!r}: there are {', '.join(self.names)}")

    def select(self, name: str | Callable, request: _Request) -> Implementation[_Request]:
        """Return the implementation of this name, the one that `"auto"` chooses for the request, or a function given
        instead of a name. Reports it to `observe_decisions`.

        **Raises** `ValueError` for an unknown name; `ObstacleError`, a `ValueError`, for an implementation that cannot
        compute the request, with the reason and the names of the ones that can.
        """
        if isinstance(name, str):
            selected = self._select(name, request)
        else:
            selected = _wrap_function(name)
        if (observe := _observer.get()) is not None:
            observe(Decision(self, name == AUTO, selected.name, self.explain(request)))
        return selected

    def _select(self, name: str, request: _Request) -> Implementation[_Request]:
        self.check_name(name)
        for each in self.implementations:
            if name == AUTO:
                is_suited = each.find_drawback(request) is None
            else:
                is_suited = each.name == name
            # Obstacles come last, since looking for one may import a kernel's library.
            if is_suited and each.find_obstacle(request) is None:
                return each
        obstacles = {each.name: each.find_obstacle(request) for each in self.implementations}
        possible = [each for each in self.implementations if obstacles[each.name] is None]
        if name == AUTO:
            if possible:
                return possible[0]
            reasons = "; ".join(f"{each} because {reason}" for each, reason in obstacles.items())
            raise ValueError(f"{self.name}: no implementation can compute this: not {reasons}")
        able = ", ".join(each.name for each in possible) or "none"
        raise ObstacleError(f"{self.name}: {name!r} cannot compute this, because {obstacles[name]}. These can: {able}")

    def explain(self, request: _Request) -> tuple[Choice, ...]:
        """Return the verdict of `"auto"` on each implementation for the request, in its order."""
        try:
            chosen = self._select(AUTO, request).name
        except ValueError:
            chosen = None
        choices = []
        for each in self.implementations:
            obstacle = each.find_obstacle(request)
            if each.name == chosen:
                reason = None
            else:
                reason = obstacle or each.find_drawback(request)
            choices.append(Choice(each.name, each.name == chosen, reason, obstacle is None))
        return tuple(choices)


@dataclasses.dataclass(frozen=True)
class Decision:
    """An implementation that was selected while a program was traced."""

    operation: Operation
    is_auto: bool
    chosen: str
    choices: tuple[Choice, ...]
    """Verdict of `"auto"` on each implementation."""


_observer: contextvars.ContextVar[Callable[[Decision], None] | None] = contextvars.ContextVar("observer", default=None)


@contextlib.contextmanager
def observe_decisions(observe: Callable[[Decision], None]) -> Iterator[None]:
    """Call `observe` with every implementation that is selected inside, in this thread."""
    token = _observer.set(observe)
    try:
        yield
    finally:
        _observer.reset(token)


def always_holds(condition: Callable[[], bool]) -> bool:
    """Return `condition()`, a comparison of sizes; False if it holds for some values of symbolic sizes only, as the
    batch of a program for `jax.export` has.

    For choices between implementations that compute the same: `always_holds(lambda: rows >= 64)`.
    """
    try:
        return bool(condition())
    except InconclusiveDimensionOperation:
        return False


def _wrap_function(function: Callable) -> Implementation:
    return Implementation(getattr(function, "__name__", type(function).__name__), function)


def refuse_other_platforms(*platforms: Platform) -> str | None:
    """Return an obstacle unless the platform that is compiled for is one of `platforms`."""
    if (current := current_platform()) in platforms:
        return None
    return f"it runs on {' and '.join(name.upper() for name in platforms)}, and this is compiled for {current.upper()}"


def find_kernel_obstacle(*platforms: Platform) -> str | None:
    """Return why a kernel of another library than XLA does not run: in an exported program, or on this platform."""
    if for_export.value:
        return "an exported program holds only XLA's own operations"
    return refuse_other_platforms(*platforms)
