"""Arrays that a compiler adds to those of the trace: copies for loops, and sums that are yet to be scattered."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jax import lax
from jax.extend.core import Literal

from .compilers import CompilerRules
from .fusion import find_readers
from .inlining import ELEMENTWISE, VIEWS, Equation, FlatJaxpr, Scan, Value, rename

_READERS_OF_COPIES = frozenset("dot_general ragged_dot_general scan while".split())


def copy_rows(body: FlatJaxpr, first: int) -> FlatJaxpr:
    """Add to a loop's body a copy of each input from the `first` on, a row of a stacked array, that a product or a loop
    reads."""
    readers, _ = find_readers(body)
    rows = {x for x in body.invars[first:] if any(one.name in _READERS_OF_COPIES for one in readers.get(x, []))}
    names: dict[Any, Any] = {}
    equations: list[Equation] = []
    for equation in body.eqns:
        for x in equation.operands:
            if x in rows and x not in names:
                names[x] = Value(x.aval)
                equations.append(Equation(lax.dynamic_slice_p, [x], [names[x]], {}, equation.scope))
        equations.append(dataclasses.replace(equation, invars=[rename(x, names) for x in equation.invars]))
    return FlatJaxpr(body.invars, [rename(x, names) for x in body.outvars], equations)


def find_copies_for_loops(
    flat: FlatJaxpr, roots: Mapping[Any, frozenset], last: Mapping[Any, int]
) -> dict[Any, list[tuple[Any, int]]]:
    """Return the copies of arrays that loops of unknown length read before their last reader does, each with the index
    of its loop. Inputs are not copied: what made them made the copy."""
    copies: dict[Any, list[tuple[Any, int]]] = {}
    for index, equation in enumerate(flat.eqns):
        arrays = {root for x in equation.operands for root in roots.get(x, ())} if equation.name == "while" else ()
        for root in arrays:
            if last[root] > index:
                copies.setdefault(root, []).append((Value(root.aval), index))
    return copies


def find_initial_constants(flat: FlatJaxpr, roots: Mapping[Any, frozenset]) -> list[tuple[Any, Equation]]:
    """Return the constant arrays that loops start from, as zeros to add to, and the equations that make them."""
    first: set[Any] = set()
    for equation in reversed(flat.eqns):
        if equation.name == "scan":
            scan = Scan.of(equation)
            first.update(x for x in equation.invars[scan.consts : scan.first_row] if not isinstance(x, Literal))
        elif equation.name == "while" or (equation.name in VIEWS and not first.isdisjoint(equation.outvars)):
            first.update(equation.operands)
    return [
        (x, equation)
        for equation in flat.eqns
        if equation.name in ELEMENTWISE and not any(roots.get(operand) for operand in equation.operands)
        for x in equation.outvars
        if x in first and roots.get(x) == frozenset([x])
    ]


def copy_stacks(
    loop: Equation, body: FlatJaxpr, rules: CompilerRules, invariant: Collection[Any]
) -> dict[Any, tuple[Equation, float]]:
    """Return which stacked inputs of a loop are copied before it: the copy, and its size over that of the input.

    `invariant` are those that do not change in a loop around it.
    """
    first = Scan.of(loop).first_row
    copies: dict[Any, tuple[Equation, float]] = {}
    for stacked, row in zip(loop.invars[first:], body.invars[first:], strict=True):
        copy = [Value(stacked.aval)]
        if rules.transposes_gathered and _is_gathered_along_later_dim(row, body):
            copies[stacked] = Equation(lax.transpose_p, [stacked], copy, {}, loop.scope), 1.0
        elif rules.casts_before_loops and stacked in invariant and (ratio := _get_cast_ratio(row, body)) < 1:
            copies[stacked] = Equation(lax.convert_element_type_p, [stacked], copy, {}, loop.scope), ratio
    return copies


def find_whole_sums(loop: Equation, body: FlatJaxpr) -> list[tuple[Any, Any]]:
    """Return operand and result of each reduce-scatter whose results a loop adds up in its carry."""
    makers = {x: equation for equation in body.eqns for x in equation.outvars}
    scan = Scan.of(loop)
    found = []
    for x, carried in zip(body.outvars[: scan.carries], body.invars[scan.consts : scan.first_row], strict=True):
        total = None if isinstance(x, Literal) else _skip_views(x, makers)
        if total is None or total.name not in ("add", "add_any"):
            continue
        added = [_find_scatter(y, makers) for y in total.operands if y is not carried]
        found += [(one.operands[0], one.outvars[0]) for one in added if one is not None]
    return found


def _is_gathered_along_later_dim(row: Any, body: FlatJaxpr) -> bool:
    same = {row}
    for equation in body.eqns:
        if same.isdisjoint(equation.operands):
            continue
        if equation.name == "all_gather" and equation.params["all_gather_dimension"] > 0:
            return True
        if equation.name in VIEWS | {"convert_element_type", "dynamic_slice"}:
            same.update(equation.outvars)
    return False


def _get_cast_ratio(row: Any, body: FlatJaxpr) -> float:
    """Return the width of what a row is cast to over its own: 1 if it has other readers."""
    same, ratio = {row}, 1.0
    for equation in body.eqns:
        if same.isdisjoint(equation.operands):
            continue
        if equation.name in VIEWS:
            same.update(equation.outvars)
        elif equation.name == "convert_element_type":
            ratio = equation.outvars[0].aval.dtype.itemsize / row.aval.dtype.itemsize
        else:
            return 1.0
    return ratio


def _find_scatter(x: Any, makers: Mapping[Any, Equation]) -> Equation | None:
    """Return the reduce-scatter that a value comes from by casts and selections."""
    maker = None if isinstance(x, Literal) else _skip_views(x, makers)
    if maker is None or maker.name == "reduce_scatter":
        return maker
    if maker.name not in ("convert_element_type", "select_n"):
        return None
    found = [_find_scatter(operand, makers) for operand in maker.operands]
    return next((one for one in found if one is not None), None)


def _skip_views(x: Any, makers: Mapping[Any, Equation]) -> Equation | None:
    maker = makers.get(x)
    while maker is not None and maker.name in VIEWS:
        maker = makers.get(maker.operands[0]) if maker.operands else None
    return maker
