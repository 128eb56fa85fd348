"""Results of the checks of a mixer or a model: the largest difference of each property, and its place."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from zoo._terminal import align_columns

TOLERANCE = 1e-4
"""Largest relative error of an output in float32, twice that for gradients: a thousand roundings of its largest number.
Faults are 1e-2 and more."""
ROUNDING = 1e-6
"""Largest gradient that counts as zero, relative to the largest one. A mask gives exactly zero; a causal convolution by
FFT does not."""


class Difference(NamedTuple):
    """Largest relative error of one comparison, and the place where it is."""

    error: float
    place: str


@dataclasses.dataclass(frozen=True)
class Check:
    """One property: what was compared, and the largest difference."""

    name: str
    compared: str
    difference: Difference | None = None
    """None if the property was not checked; `cause` then says why."""
    bound: float = TOLERANCE
    cause: str = ""
    """The usual cause of a failure."""

    @property
    def passed(self) -> bool:
        return self.difference is None or self.difference.error <= self.bound  # NaN fails

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.name} is not checked: {self.cause}"
        error, place = self.difference
        if self.passed:
            return f"{self.name}: {self.compared}: {error:.1e}"
        if error < float("inf"):
            place = f"{self.compared}, differ by {error:.1e} (bound {self.bound}): {place}"
        return f"{self.name}: {place.rstrip('.')}. {self.cause}".strip()


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """Every check of one mixer or model. `print` shows a table."""

    subject: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)

    def __str__(self) -> str:
        rows = [(check.name, *_describe_outcome(check)) for check in self.checks]
        return "\n".join([f"{self.subject} {self._summarize()}", *align_columns(rows, right=(1,))])

    def _summarize(self) -> str:
        skipped = sum(check.difference is None for check in self.checks)
        made = len(self.checks) - skipped
        if self.failures:
            outcome = f"fails {len(self.failures)} of {made} checks"
        else:
            outcome = f"passes {made} checks"
        if skipped:
            outcome += f", {skipped} not made"
        return outcome

    def raise_failures(self) -> None:
        """**Raises** `AssertionError` with one line for each failed check."""
        if self.failures:
            lines = [f"{self.subject} {self._summarize()}", *(f"  {check}" for check in self.failures)]
            raise AssertionError("\n".join(lines))


def _describe_outcome(check: Check) -> tuple[str, str]:
    if check.difference is None:
        return "-", f"not checked: {check.cause}"
    error, place = check.difference
    if check.passed:
        return f"{error:.1e}", check.compared
    return f"{error:.1e}", f"FAILED: {check.compared}: {place}"


def flaw(place: str) -> Difference:
    """Return an infinite difference, for a fault without a size."""
    return Difference(float("inf"), place)


def find_worst(differences: Iterable[Difference]) -> Difference:
    """Return the largest difference; one that is not a number counts as infinite. Zero for none."""
    comparable = [flaw(x.place) if np.isnan(x.error) else x for x in differences]
    return max(comparable, key=lambda x: x.error, default=Difference(0.0, ""))


def join_flaws(places: Sequence[str]) -> Difference:
    """Return one difference for all places where something is wrong; zero for none."""
    if not places:
        return Difference(0.0, "")
    return flaw(", ".join(dict.fromkeys(places)))


def compare_tokens(actual: Any, expected: Any, mask: Any = None, *, of: str = "the output") -> Difference:
    """Compare arrays "batch seq features" where `mask` "batch seq" is True, relative to the largest number expected."""
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    if mask is None:
        mask = np.ones(expected.shape[:2], bool)
    if actual.shape != expected.shape:
        return flaw(f"{of} has the shape {list(actual.shape)}, not {list(expected.shape)}")
    if not mask.any():
        return Difference(0.0, "")
    errors = np.abs(actual - expected).max(-1, where=mask[..., None], initial=0)
    row, position = np.unravel_index(np.argmax(errors), errors.shape)  # a NaN counts as the largest
    scale = np.abs(expected[mask]).max()
    return Difference(float(errors[row, position] / max(scale, 1e-30)), f"{of} at row {row}, position {position}")


def compare_gradients(names: Iterable[str], actual: Iterable[Any], expected: Iterable[Any]) -> Difference:
    """Compare gradients, each relative to its largest number, or to 1e-3 of the largest of all: a gradient that is zero
    in theory, such as the gradient of a key's bias under softmax, is only rounding."""
    expected = [np.asarray(x, np.float32) for x in expected]
    floor = 1e-3 * max((np.abs(x).max() for x in expected), default=0.0)
    differences = []
    for name, ours, theirs in zip(names, actual, expected, strict=True):
        error = np.abs(np.asarray(ours) - theirs).max() / max(np.abs(theirs).max(), floor, 1e-30)
        differences.append(Difference(float(error), f"the gradient of {name}"))
    return find_worst(differences)


def run_checks(name: str, compared: str, checks: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Yield the checks of a group. One that raises is a failed check with the error's first line."""
    try:
        yield from checks()
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        yield Check(name, compared, flaw(f"{compared}: raised {type(error).__name__}: {first}"))
