"""Find the values of a jaxpr that a compiled program computes: the values that its results and effects depend on.

XLA removes the rest, from the bodies of loops too. The jaxpr of a backward pass has some, such as unused sums among its
recomputed values.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from .inlining import Equation, FlatJaxpr, Scan, inline_calls

_BODIES = frozenset({"scan", "shard_map"})
"""Primitives whose inner jaxpr has their operands and results, in order."""


class NeededValues:
    """Inlines jaxprs and finds the needed values of each, once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, tuple[bool, ...]], tuple[FlatJaxpr, set[Any], Any]] = {}

    def find(self, jaxpr: Any, kept: Sequence[bool]) -> tuple[FlatJaxpr, set[Any]]:
        """Return the inlined jaxpr, and the values that its results in `kept`, and effects, depend on."""
        key = id(jaxpr), tuple(kept)
        if key not in self._found:
            flat = inline_calls(jaxpr, loops_of_one=True)
            needed = {x for x, keep in zip(flat.outvars, kept, strict=True) if keep and not isinstance(x, Literal)}
            for equation in reversed(flat.eqns):
                if is_needed(equation, needed):
                    needed.update(self._find_operands(equation, needed))
            self._found[key] = flat, needed, jaxpr  # which holds on to its id
        return self._found[key][:2]

    def find_results(self, equation: Equation, needed: set[Any], jaxpr: Any) -> list[bool]:
        """Return which results of an equation's inner jaxpr are used.

        The next iteration of a loop uses the parts of the carry that it reads.
        """
        count = len(getattr(jaxpr, "jaxpr", jaxpr).outvars)
        if equation.name not in _BODIES | {"cond"} or equation.has_effects:
            return [True] * count
        kept = [x in needed for x in equation.outvars]
        if equation.name != "scan":
            return kept
        scan = Scan.of(equation)
        while True:
            body, found = self.find(jaxpr, kept)
            carry = body.invars[scan.consts : scan.first_row]
            wider = [keep or x in found for keep, x in zip(kept, carry, strict=False)] + kept[scan.carries :]
            if wider == kept:
                return kept
            kept = wider

    def _find_operands(self, equation: Equation, needed: set[Any]) -> list[Any]:
        if equation.name not in _BODIES or equation.has_effects:
            return equation.operands
        jaxpr = equation.params["jaxpr"]
        body, found = self.find(jaxpr, self.find_results(equation, needed, jaxpr))
        pairs = zip(equation.invars, body.invars, strict=True)
        return [given for given, inside in pairs if inside in found and not isinstance(given, Literal)]


def is_needed(equation: Equation, needed: set[Any]) -> bool:
    """Return True for an equation with an effect, or with a result that is needed."""
    return equation.has_effects or not needed.isdisjoint(equation.outvars)
