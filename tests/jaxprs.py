"""Equations of a jaxpr and arrays that it computes, for tests of what a program must not materialize."""

from collections.abc import Iterator
from typing import Any

import jax


def arrays(jaxpr: Any) -> Iterator[Any]:
    """Yield the aval of every array that a jaxpr computes, including those in its loops and calls."""
    for equation in equations(jaxpr):
        yield from (variable.aval for variable in equation.outvars)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation of a jaxpr, including those in its loops and calls."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(part):
                yield from equations(part)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
