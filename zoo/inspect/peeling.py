"""Take the first iteration out of loops that reduce-scatter, as XLA's compiler for GPUs does.

It pipelines a reduce-scatter: each iteration computes beside that of the one before, so that the first one, which has
none before it, is peeled off. What the peeled iteration computes from the loop's inputs alone waits for nothing; of a
backward pass that recomputes, this is the recomputation, which then runs before the loss.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jax import lax

from .inlining import Equation, FlatJaxpr, Value, inline_calls, rename
from .operations import find_subjaxprs


def peel_loops(flat: FlatJaxpr) -> FlatJaxpr:
    """Peel the first iteration off each loop with a reduce-scatter, and move its independent part to where its inputs
    are known."""
    equations: list[Equation] = []
    for equation in flat.eqns:
        if equation.name != "scan" or equation.params["length"] < 2 or not _scatters(equation.params["jaxpr"]):
            equations.append(equation)
            continue
        early, late, rest = _peel(equation)
        needed = {x for one in early for x in one.operands}
        places = [index for index, one in enumerate(equations) if not needed.isdisjoint(one.outvars)]
        start = max(places, default=-1) + 1
        equations = [*equations[:start], *early, *equations[start:], *late, rest]
    return FlatJaxpr(flat.invars, flat.outvars, equations)


def _peel(loop: Equation) -> tuple[list[Equation], list[Equation], Equation]:
    """Return the equations of the first iteration that do not depend on the carry, those that do, and the loop without
    it."""
    body = inline_calls(loop.params["jaxpr"], loop.scope)
    consts, carries = loop.params["num_consts"], loop.params["num_carry"]
    names: dict[Any, Any] = dict(zip(body.invars[: consts + carries], loop.invars, strict=False))
    early: list[Equation] = []
    for x, stacked in zip(body.invars[consts + carries :], loop.invars[consts + carries :], strict=True):
        names[x] = Value(x.aval)
        early.append(Equation(lax.slice_p, [stacked], [names[x]], {}, loop.scope))
    late, dependent = [], set(body.invars[consts : consts + carries])
    for equation in body.eqns:
        names.update((x, Value(x.aval)) for x in equation.outvars)
        invars = [rename(x, names) for x in equation.invars]
        copy = dataclasses.replace(equation, invars=invars, outvars=[names[x] for x in equation.outvars])
        if dependent.isdisjoint(equation.operands):
            early.append(copy)
        else:
            late.append(copy)
            dependent.update(equation.outvars)
    carry = [rename(x, names) for x in body.outvars[:carries]]
    invars = [*loop.invars[:consts], *carry, *loop.invars[consts + carries :]]
    params = loop.params | {"length": loop.params["length"] - 1}
    return early, late, Equation(loop.primitive, invars, loop.outvars, params, loop.scope)


def _scatters(jaxpr: Any) -> bool:
    equations: Iterable[Any] = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return any(
        "reduce_scatter" in equation.primitive.name or any(map(_scatters, find_subjaxprs(equation.params)))
        for equation in equations
        if equation.primitive.name != "scan"
    )
