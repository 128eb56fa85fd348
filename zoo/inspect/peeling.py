"""Take the first iteration out of loops that reduce-scatter, as XLA's compiler for GPUs does.

It pipelines a reduce-scatter whose results are stacked: each iteration scatters what the one before computed, beside
its own products, so that the first one, which has none before it, is peeled off.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jax import lax
from jax.extend.core import Literal

from .inlining import ELEMENTWISE, VIEWS, Equation, FlatJaxpr, Value, inline_calls, rename
from .operations import find_subjaxprs


def peel_loops(flat: FlatJaxpr) -> FlatJaxpr:
    """Peel the first iteration off each loop with a reduce-scatter."""
    equations: list[Equation] = []
    for equation in flat.eqns:
        is_peeled = equation.name == "scan" and equation.params["length"] > 1 and _scatters(equation.params["jaxpr"])
        equations += _peel(equation) if is_peeled else [equation]
    return FlatJaxpr(flat.invars, flat.outvars, equations)


def find_pipelined(body: FlatJaxpr, carries: int) -> list[Any]:
    """Return the operands of reduce-scatters in a loop's body whose results it stacks: they are scattered an iteration
    later."""
    scattered: dict[Any, Any] = {}
    for equation in body.eqns:
        if equation.name == "reduce_scatter":
            scattered.update(dict.fromkeys(equation.outvars, equation.operands[0]))
        elif equation.name in ELEMENTWISE | VIEWS:
            operands = [scattered[x] for x in equation.operands if x in scattered]
            scattered.update(dict.fromkeys(equation.outvars, operands[0]) if operands else {})
    stacked = [x for x in body.outvars[carries:] if not isinstance(x, Literal)]
    return list(dict.fromkeys(scattered[x] for x in stacked if x in scattered))


def _peel(loop: Equation) -> list[Equation]:
    """Return the equations of the first iteration, and the loop without it."""
    body = inline_calls(loop.params["jaxpr"], loop.scope)
    consts, carries = loop.params["num_consts"], loop.params["num_carry"]
    names: dict[Any, Any] = dict(zip(body.invars[: consts + carries], loop.invars, strict=False))
    equations: list[Equation] = []
    for x, stacked in zip(body.invars[consts + carries :], loop.invars[consts + carries :], strict=True):
        names[x] = Value(x.aval)
        equations.append(Equation(lax.slice_p, [stacked], [names[x]], {}, loop.scope))
    for equation in body.eqns:
        names.update((x, Value(x.aval)) for x in equation.outvars)
        invars = [rename(x, names) for x in equation.invars]
        equations.append(dataclasses.replace(equation, invars=invars, outvars=[names[x] for x in equation.outvars]))
    carry = [rename(x, names) for x in body.outvars[:carries]]
    invars = [*loop.invars[:consts], *carry, *loop.invars[consts + carries :]]
    params = loop.params | {"length": loop.params["length"] - 1}
    return [*equations, Equation(loop.primitive, invars, loop.outvars, params, loop.scope)]


def _scatters(jaxpr: Any) -> bool:
    equations: Iterable[Any] = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return any(
        "reduce_scatter" in equation.primitive.name or any(map(_scatters, find_subjaxprs(equation.params)))
        for equation in equations
        if equation.primitive.name != "scan"
    )
