"""Errors of every step of a replayed training run, and the table that shows them."""

import dataclasses
import math
from typing import Literal, NamedTuple

from zoo._terminal import align_columns

from .comparison import Comparison

Phase = Literal["forward", "gradient", "optimizer"]
_PHASES: dict[str, Phase] = {
    "forward": "forward",
    "gradients": "gradient",
    "moments": "optimizer",
    "updates": "optimizer",
}
_SHOWN_STEPS = 10
_ADVICE = {
    "forward": "It starts from the same weights: look at the forward pass, which zoo parity compares layer by layer",
    "gradient": "The loss agrees, and gradients of later layers do: look at the backward pass of this layer",
    "optimizer": "It takes the same gradients: look at the optimizer, its schedule, clipping and weight decay",
}


class FirstFailure(NamedTuple):
    """The first comparison out of tolerance, and the phase of its step."""

    step: int
    phase: Phase
    comparison: Comparison


@dataclasses.dataclass(frozen=True)
class ComparedStep:
    """Errors of one step, in the order in which it computes."""

    number: int
    loss: float
    """The loss of PyTorch."""
    forward: tuple[Comparison, ...]
    gradients: tuple[Comparison, ...]
    """From the last layer to the first, as the backward pass computes them; then their norm."""
    moments: tuple[Comparison, ...]
    """First and second moments after the update."""
    updates: tuple[Comparison, ...]
    """Distances that the update moves weights."""
    drift: float
    """Error of the loss in a run of our own, from the first weights on."""

    @property
    def parts(self) -> dict[str, tuple[Comparison, ...]]:
        """All comparisons by their field."""
        return {name: getattr(self, name) for name in _PHASES}

    @property
    def first_failure(self) -> FirstFailure | None:
        """The first comparison out of tolerance: everything before it agrees."""
        for name, lines in self.parts.items():
            for line in lines:
                if not line.passed:
                    return FirstFailure(self.number, _PHASES[name], line)
        return None


@dataclasses.dataclass(frozen=True)
class TrainingReport:
    """All steps that were compared. `print` shows a table."""

    steps: tuple[ComparedStep, ...]
    stored: int
    """Steps of the stored run."""

    @property
    def passed(self) -> bool:
        return self.first_failure is None

    @property
    def first_failure(self) -> FirstFailure | None:
        """The first step and comparison out of tolerance."""
        return next((step.first_failure for step in self.steps if step.first_failure is not None), None)

    def __str__(self) -> str:
        return self.format()

    def format(self, *, every_step: bool = False) -> str:
        """Return a table of the largest errors of each step, or of about ten steps and the first that failed."""
        stride = 1 if every_step else -(-len(self.steps) // _SHOWN_STEPS)
        numbers = {*range(0, len(self.steps), stride), len(self.steps) - 1}
        if self.first_failure is not None:
            numbers.add(self.first_failure.step)
        shown = [step for step in self.steps if step.number in numbers]
        head = ["step", "loss", "error", "gradients", "moments", "updates", "drift", "largest error of a gradient"]
        rows = [head, *map(_format_step, shown)]
        return "\n".join([*align_columns(rows, right=range(7)), "", self._summarize()])

    def _summarize(self) -> str:
        first = self.first_failure
        if first is None:
            comparisons = sum(len(lines) for step in self.steps for lines in step.parts.values())
            return f"{len(self.steps)} of {self.stored} steps, {comparisons} comparisons, all within tolerance"
        line = first.comparison
        return (
            f"Step {first.step} is the first out of tolerance, in the {first.phase}: {line.name} is off by "
            f"{line.error:.1e} (tolerance {line.tolerance:.0e}). {_ADVICE[first.phase]}"
        )


def _format_step(step: ComparedStep) -> list[str]:
    worst = max(step.gradients, key=_order)
    errors = [*(max(lines, key=_order).error for lines in step.parts.values()), step.drift]
    mark = "" if step.first_failure is None else "  <- out of tolerance"
    return [str(step.number), f"{step.loss:.5f}", *(f"{error:.1e}" for error in errors), f"{worst.name}{mark}"]


def _order(line: Comparison) -> float:
    """Order by error; one that is not a number is the largest."""
    return math.inf if math.isnan(line.error) else line.error
