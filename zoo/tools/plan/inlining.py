"""Inline the calls of a jaxpr, as XLA does: a `jit` within a `jit`, custom derivatives and rematerialization."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import Literal

from zoo.inspect.operations import find_subjaxprs

_CALLS = frozenset("checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit pjit remat2".split())


VIEWS = frozenset(
    """
    copy copy_p drop_varying expand_dims name optimization_barrier pbroadcast pvary reshape squeeze stop_gradient
    """.split()
)
"""Primitives whose result is their operand in another form."""

ELEMENTWISE = frozenset(
    """
    abs add add_any and atan2 bitcast_convert_type broadcast_in_dim cbrt ceil clamp convert_element_type cos div eq erf
    erf_inv exp exp2 expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not or pad
    pow real reduce_precision rem rev round rsqrt select_n sharding_constraint shift_left shift_right_logical sign sin
    slice split sqrt square sub tan tanh transpose xor
    """.split()
)


class Value:
    """A variable of an inlined call. Two copies of a call have separate values."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any):
        self.aval = aval


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """An operation that calls no other, or a loop, a branch, a `shard_map` or a kernel."""

    primitive: Any
    invars: Sequence[Any]
    outvars: Sequence[Any]
    params: dict[str, Any]
    scope: str
    """The modules and transformations that it was traced in."""
    has_effects: bool = False
    """True if it has an effect besides computing its results, such as a callback."""

    @property
    def name(self) -> str:
        """JAX's name of the primitive."""
        return self.primitive.name

    @property
    def operands(self) -> list[Any]:
        """Its inputs without literals."""
        return [x for x in self.invars if not isinstance(x, Literal)]


@dataclasses.dataclass(frozen=True)
class Scan:
    """The parts of a scan, (constants, carry, rows) -> (carry, rows).

    The names of a scan's parameters change with JAX's version, this order does not. A row has one dim less inside the
    loop than outside, so dims are counted.
    """

    body: Any
    consts: int
    carries: int

    @classmethod
    def of(cls, equation: Any) -> "Scan":
        """Divide the operands and results of a scan."""
        body = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])
        carries = len(body.outvars) - _count_rows(equation.outvars, body.outvars)
        consts = len(body.invars) - _count_rows(equation.invars, body.invars) - carries
        return cls(body, consts, carries)

    @property
    def first_row(self) -> int:
        """Position of the first stacked operand."""
        return self.consts + self.carries


def _count_rows(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(x.aval.ndim > row.aval.ndim for x, row in zip(outside, inside, strict=True))


@dataclasses.dataclass(frozen=True)
class FlatJaxpr:
    """A jaxpr with its calls replaced by the equations of the jaxprs that they call."""

    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: Sequence[Equation]


def inline_calls(jaxpr: Any, scope: str = "", *, loops_of_one: bool = False) -> FlatJaxpr:
    """Inline the calls of a jaxpr that was traced in a scope, and, if `loops_of_one`, loops of one iteration."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    equations = []
    names = _inline(inner, {}, equations, scope, is_called=False, loops_of_one=loops_of_one)
    return FlatJaxpr(inner.invars, [rename(x, names) for x in inner.outvars], equations)


def _inline(
    jaxpr: Any, names: dict[Any, Any], equations: list[Equation], scope: str, *, is_called: bool, loops_of_one: bool
) -> dict[Any, Any]:
    """Append the equations of a jaxpr, and return the names of its variables in them."""
    for equation in jaxpr.eqns:
        invars = [rename(x, names) for x in equation.invars]
        name = equation.primitive.name
        stack = str(equation.source_info.name_stack)
        inside = "/".join(filter(None, (scope, stack)))
        inner = []
        if name in _CALLS:
            inner = list(find_subjaxprs(equation.params))
        if len(inner) == 1:
            called = getattr(inner[0], "jaxpr", inner[0])
            given = dict(zip(called.invars, invars[len(invars) - len(called.invars) :], strict=True))
            given = _inline(called, given, equations, inside, is_called=True, loops_of_one=loops_of_one)
            names.update((x, rename(y, given)) for x, y in zip(equation.outvars, called.outvars, strict=True))
            continue
        if loops_of_one and name == "scan" and equation.params["length"] == 1:
            names.update(_inline_iteration(equation, invars, equations, inside))
            continue
        if is_called:
            names.update((x, Value(x.aval)) for x in equation.outvars)
        outvars = [names.get(x, x) for x in equation.outvars]
        if name == "optimization_barrier":  # each result depends only on its own operand
            pairs = zip(invars, outvars, strict=True)
            equations += [Equation(equation.primitive, [x], [y], equation.params, inside) for x, y in pairs]
            continue
        # A collective has the effect of naming its axis, which does not count.
        effects = any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)
        equations.append(Equation(equation.primitive, invars, outvars, equation.params, inside, effects))
    return names


def _inline_iteration(scan: Any, invars: list[Any], equations: list[Equation], scope: str) -> dict[Any, Any]:
    """Append the equations of a loop of one iteration, and return the names of its results in them."""
    parts = Scan.of(scan)
    body = parts.body
    carries = parts.carries
    first = parts.first_row
    given = dict(zip(body.invars[:first], invars, strict=False))
    for x, stacked in zip(body.invars[first:], invars[first:], strict=True):
        given[x] = Value(x.aval)
        equations.append(Equation(lax.squeeze_p, [stacked], [given[x]], {"dimensions": (0,)}, scope))
    given = _inline(body, given, equations, scope, is_called=True, loops_of_one=True)
    results = [rename(x, given) for x in body.outvars]
    stacks = {x: Value(x.aval) for x in scan.outvars[carries:]}
    for x, (stack, value) in zip(results[carries:], stacks.items(), strict=True):
        equations.append(Equation(lax.reshape_p, [x], [value], {"new_sizes": stack.aval.shape}, scope))
    return dict(zip(scan.outvars[:carries], results, strict=False)) | stacks


def rename(x: Any, names: dict[Any, Any]) -> Any:
    """Return the name of a variable in the equations of its caller."""
    if isinstance(x, Literal):
        return x
    return names.get(x, x)
