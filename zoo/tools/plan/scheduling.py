"""The order that a compiler runs the operations of a step in, where it is not that of the trace."""

from typing import Any

from .compilers import CompilerRules
from .fusion import find_readers
from .inlining import ELEMENTWISE, VIEWS, FlatJaxpr
from .peeling import peel_loops

_PRODUCTS = frozenset("dot_general ragged_dot_general while".split())
"""Matrix products, and those of groups of unknown size, which are loops."""


def order_as_compiled(flat: FlatJaxpr, rules: CompilerRules) -> FlatJaxpr:
    """Return a jaxpr of what a device does with its equations in the order in which they run."""
    flat = peel_loops(flat) if rules.pipelines_scatters else flat
    names = {equation.name for equation in flat.eqns}
    has_both = "reduce_scatter" in names and not names.isdisjoint(("scan", "while"))
    if rules.postpones_weight_gradients or (rules.postpones_beside_loops and has_both):
        flat = _postpone(flat, _find_weight_gradients(flat))
    return _postpone(flat, _find_after_scatters(flat)) if rules.postpones else flat


def _postpone(flat: FlatJaxpr, late: set[int]) -> FlatJaxpr:
    """Move the equations with these ids to the end, in their order."""
    first = [equation for equation in flat.eqns if id(equation) not in late]
    return FlatJaxpr(flat.invars, flat.outvars, [*first, *(x for x in flat.eqns if id(x) in late)])


def _find_weight_gradients(flat: FlatJaxpr) -> set[int]:
    """Return the ids of products that only results need, and of what is between."""
    readers, results = find_readers(flat)
    late: set[int] = set()
    for equation in reversed(flat.eqns):
        used = [x for x in equation.outvars if x in results or readers.get(x)]
        is_simple = equation.name in ELEMENTWISE | VIEWS | {"reduce_scatter"} and len(equation.outvars) == 1
        readers_late = all(id(reader) in late for x in used for reader in readers.get(x, []))
        if used and readers_late and (is_simple or equation.name in _PRODUCTS):
            late.add(id(equation))
    return late


def _find_after_scatters(flat: FlatJaxpr) -> set[int]:
    """Return the ids of reduce-scatters, and of what needs their results."""
    found: set[Any] = set()
    late: set[int] = set()
    for equation in flat.eqns:
        if equation.name == "reduce_scatter" or not found.isdisjoint(equation.operands):
            late.add(id(equation))
            found.update(equation.outvars)
    return late
