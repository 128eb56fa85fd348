"""Collectives that a compiler leaves out: equal ones, and sums that are added up afterwards.

XLA gathers an array once if a program gathers it twice, such as a tied embedding. It turns `psum(a) + psum(b)` into
`psum(a + b)`: the gradients of an input that queries, keys and values share are added before they are summed.
"""

from collections.abc import Mapping
from typing import Any

from jax.extend.core import Literal

from .inlining import ELEMENTWISE, VIEWS, FlatJaxpr

_SUMS = frozenset("psum psum2 psum_invariant reduce_scatter unreduced_reduce_scatter".split())
_GATHERS = frozenset("all_gather all_gather_invariant all_gather_reduced".split())


def find_left_out(flat: FlatJaxpr) -> set[Any]:
    """Return the results of collectives that a compiled program does not compute."""
    return _find_repeated_gathers(flat) | _find_added_sums(flat)


def _find_repeated_gathers(flat: FlatJaxpr) -> set[Any]:
    names = _name_values(flat)
    seen = set()
    repeated = set()
    for equation in flat.eqns:
        if equation.name in _GATHERS:
            operands = tuple(names.get(id(x), id(x)) for x in equation.invars)
            key = equation.name, operands, str(sorted(equation.params.items(), key=lambda item: item[0]))
            if key in seen:
                repeated.update(equation.outvars)
            seen.add(key)
    return repeated


def _find_added_sums(flat: FlatJaxpr) -> set[Any]:
    """Return all but one of the sums whose results are added and not used otherwise."""
    uses: dict[Any, int] = {}
    for x in (*(x for equation in flat.eqns for x in equation.operands), *flat.outvars):
        if not isinstance(x, Literal):
            uses[x] = uses.get(x, 0) + 1
    sums: dict[Any, tuple] = {}  # of each value that is a sum: its primitive and parameters
    origin: dict[Any, Any] = {}
    left_out = set()
    for equation in flat.eqns:
        if equation.name in _SUMS:
            options = equation.name, str(sorted(equation.params.items(), key=lambda item: item[0]))
            for x in equation.outvars:
                sums[x] = options
                origin[x] = x
        elif equation.name in VIEWS and len(equation.operands) == 1:
            (x,) = equation.operands
            if x in sums and uses[x] == 1:
                sums[equation.outvars[0]] = sums[x]
                origin[equation.outvars[0]] = origin[x]
        elif equation.name in ("add", "add_any") and len(equation.operands) == 2:
            one, other = equation.operands
            if sums.get(one, 1) == sums.get(other, 2) and uses[one] == uses[other] == 1:
                left_out.add(origin[other])
                sums[equation.outvars[0]] = sums[one]
                origin[equation.outvars[0]] = origin[one]
    return left_out


def _name_operand(x: Any, names: Mapping[int, Any]) -> Any:
    if isinstance(x, Literal):
        return str(x.val)
    return names.get(id(x), id(x))


def _name_values(flat: FlatJaxpr) -> dict[int, Any]:
    """Return a name for the value of each variable, by its id. Equal values have one name, since XLA keeps each
    once."""
    names: dict[int, Any] = {}
    for equation in flat.eqns:
        operands = tuple(_name_operand(x, names) for x in equation.invars)
        if equation.name in VIEWS and len(operands) == 1:
            names[id(equation.outvars[0])] = operands[0]
        elif equation.name in ELEMENTWISE and len(equation.outvars) == 1:
            options = str(sorted(equation.params.items(), key=lambda item: item[0]))
            names[id(equation.outvars[0])] = hash((equation.name, operands, options))
    return names
