"""Errors of what was compared with PyTorch, in the order of the forward pass, and the table that shows them."""

import dataclasses
import math
from typing import Any

import numpy as np

from zoo._terminal import align_columns

TOLERANCE = 1e-4
"""Largest relative error of activations and logits (see `relative_error`); twice that for gradients, by norm."""
GRADIENT_FLOOR = 1e-7
"""Rounding error of a gradient that is zero (a router with top-1 weight 1), relative to the largest gradient norm."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Errors of one activation, loss or gradient."""

    name: str
    error: float
    """`relative_error` of activations; of gradients, norm of the difference / norm."""
    tolerance: float
    own: float | None = None
    """Error of the layer by itself, on PyTorch's input to it."""
    bfloat16: float | None = None
    """Our error in bfloat16, against PyTorch in float32."""
    theirs: float | None = None
    """PyTorch's error in bfloat16, against PyTorch in float32."""

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance and (self.own is None or self.own <= self.tolerance)


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """All comparisons, in the order of the forward pass. `print` shows a table."""

    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()
    """Results that were not compared, and train mode of a module."""

    @property
    def passed(self) -> bool:
        return all(line.passed for line in self.comparisons)

    @property
    def first_failure(self) -> Comparison | None:
        """The first layer that is wrong by itself, or else the first comparison out of tolerance."""
        alone = [line for line in self.comparisons if line.own is not None and not line.own <= line.tolerance]
        return next(iter([*alone, *(line for line in self.comparisons if not line.passed)]), None)

    def __str__(self) -> str:
        return self.format()

    def format(self, *, every_gradient: bool = False) -> str:
        """Return the table, with the five gradients that have the largest errors, or with every gradient."""
        computed = [line for line in self.comparisons if not _is_gradient(line)]
        gradients = sorted(filter(_is_gradient, self.comparisons), key=lambda line: -line.error)
        shown = gradients if every_gradient else gradients[:5]
        rows = [["", "error", "alone", "bfloat16", "PyTorch's", ""], *map(_format_line, [*computed, *shown])]
        used = [column for column in range(6) if any(row[column] for row in rows[1:])]
        table = align_columns([[row[column] for column in used] for row in rows], right=range(1, len(used)))
        if len(shown) < len(gradients):
            table.append(f"and {len(gradients) - len(shown)} gradients with smaller errors (--all shows them)")
        return "\n".join([*table, "", *self.notes, self._summarize()])

    def _summarize(self) -> str:
        first = self.first_failure
        if first is None:
            return f"{len(self.comparisons)} comparisons, all within tolerance"
        failed = sum(not line.passed for line in self.comparisons)
        return f"out of tolerance: {failed} of {len(self.comparisons)} comparisons. Look first at {first.name}"


def _is_gradient(line: Comparison) -> bool:
    return line.name.startswith(("gradient of ", "norm of the gradient of "))


def _format_line(line: Comparison) -> list[str]:
    figures = [line.error, line.own, line.bfloat16, line.theirs]
    mark = "" if line.passed else "<- out of tolerance"
    return [line.name, *map(_format_error, figures), mark]


def _format_error(error: float | None) -> str:
    if error is None:
        return ""
    return f"{error:.1e}"


def relative_error(ours: Any, expected: Any) -> float:
    """Return max |ours - expected| / max |expected|, and 0 for equal arrays; infinite if `ours` is None, has another
    shape or is not finite."""
    if ours is None:
        return math.inf
    ours = _widen(ours)
    expected = _widen(expected)
    if ours.shape != expected.shape or not np.isfinite(ours).all():
        return math.inf
    return _divide(np.abs(ours - expected).max(initial=0), np.abs(expected).max(initial=0))


def norm_error(ours: Any, expected: Any, floor: float = 0.0) -> float:
    """Return norm of the difference / norm of `expected`, which counts as `floor` where it is smaller; infinite if
    `ours` is None or has another shape."""
    if ours is None:
        return math.inf
    ours = _widen(ours)
    expected = _widen(expected)
    if ours.shape != expected.shape:
        return math.inf
    return _divide(np.linalg.norm(ours - expected), max(float(np.linalg.norm(expected)), floor))


def _divide(difference: Any, scale: Any) -> float:
    if difference == 0:
        return 0.0
    if scale == 0:
        return math.inf
    return float(difference / scale)


def _widen(x: Any) -> np.ndarray:
    """Return an array as float32, or as a wider type that it has, since bfloat16 and integers do not subtract well."""
    x = np.asarray(x)
    return x.astype(np.result_type(x.dtype, np.float32))
