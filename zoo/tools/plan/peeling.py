"""Take the first iteration out of loops that reduce-scatter, as XLA's compiler for GPUs does.

It pipelines a reduce-scatter whose results are stacked: each iteration scatters what the one before computed, beside
its own products, so that the first one, which has none before it, is peeled off.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jax import lax
from jax.extend.core import Literal

from .inlining import ELEMENTWISE, VIEWS, Equation, FlatJaxpr, Scan, Value, inline_calls, rename


def peel_loops(flat: FlatJaxpr) -> FlatJaxpr:
    """Peel the first iteration off each loop that pipelines a reduce-scatter."""
    equations: list[Equation] = []
    for equation in flat.eqns:
        is_loop = equation.name == "scan" and equation.params["length"] > 1
        body = inline_calls(equation.params["jaxpr"], equation.scope) if is_loop else None
        pipelined = find_pipelined(body, Scan.of(equation).carries) if body is not None else []
        equations += _peel(equation, body, pipelined) if body is not None and pipelined else [equation]
    return FlatJaxpr(flat.invars, flat.outvars, equations)


def find_pipelined(body: FlatJaxpr, carries: int) -> list[Equation]:
    """Return the reduce-scatters of a loop's body whose results are stacked, and not needed in the same iteration."""
    needed = {x for x in body.outvars[:carries] if not isinstance(x, Literal)}
    stacked = {x for x in body.outvars[carries:] if not isinstance(x, Literal)}
    found = []
    for equation in reversed(body.eqns):
        is_stacked, is_needed = (not values.isdisjoint(equation.outvars) for values in (stacked, needed))
        if equation.name == "reduce_scatter" and is_stacked and not is_needed:
            found.append(equation)
        elif equation.name in ELEMENTWISE | VIEWS:
            stacked.update(equation.operands if is_stacked else ())
            needed.update(equation.operands if is_needed else ())
        else:
            needed.update(equation.operands)
    return found


def _peel(loop: Equation, body: FlatJaxpr, pipelined: Iterable[Equation]) -> list[Equation]:
    """Return the equations of the first iteration, and the loop without it, which scatters what the first computed."""
    scan = Scan.of(loop)
    names: dict[Any, Any] = dict(zip(body.invars[: scan.first_row], loop.invars, strict=False))
    equations: list[Equation] = []
    for x, stacked in zip(body.invars[scan.first_row :], loop.invars[scan.first_row :], strict=True):
        names[x] = Value(x.aval)
        equations.append(Equation(lax.slice_p, [stacked], [names[x]], {}, loop.scope))
    later = {x for equation in pipelined for x in equation.outvars}
    for equation in body.eqns:
        if not later.isdisjoint((*equation.operands, *equation.outvars)):
            later.update(equation.outvars)
            continue
        names.update((x, Value(x.aval)) for x in equation.outvars)
        invars = [rename(x, names) for x in equation.invars]
        equations.append(dataclasses.replace(equation, invars=invars, outvars=[names[x] for x in equation.outvars]))
    carry = [rename(x, names) for x in body.outvars[: scan.carries]]
    invars = [*loop.invars[: scan.consts], *carry, *loop.invars[scan.first_row :]]
    params = loop.params | {"length": loop.params["length"] - 1, "is_pipelined": True}
    return [*equations, Equation(loop.primitive, invars, loop.outvars, params, loop.scope)]
