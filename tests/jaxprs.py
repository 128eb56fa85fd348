"""What a program computes, for tests that say what it must not."""

from collections.abc import Iterator
from typing import Any

import jax


def arrays(program: Any) -> Iterator[Any]:
    """Shape and dtype of every array that a jaxpr computes, inside its loops and calls too."""
    for equation in getattr(program, "jaxpr", program).eqns:
        yield from (variable.aval for variable in equation.outvars)
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(part):
                yield from arrays(part)


def is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
