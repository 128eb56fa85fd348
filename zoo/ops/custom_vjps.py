"""Errors that name the operation where a custom VJP cannot be differentiated, forward or twice.

A second derivative is forward over reverse, `jax.jvp(jax.grad(f), ...)`, or reverse over reverse, `jax.grad` of a
function of `jax.grad(f)`. For both, JAX differentiates the two rules of a custom VJP. It cannot differentiate a custom
VJP itself forward. So a rule calls custom VJPs by `run_in_rule`, and functions that contain some by `evaluate`.

Where JAX cannot differentiate, its message names no operation. There a custom VJP passes its operands, or a rule its
arrays, through an identity that raises by name. In a program that is not differentiated further the identity vanishes.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

_Tree = TypeVar("_Tree")

_TWO_REVERSE = "take two reverse ones for it, as docs/second-derivatives.md shows"


def refuse_second_derivative(arrays: _Tree, operation: str, instead: str) -> _Tree:
    """Return the operands of a forward rule, or the cotangents of a backward rule, that has no derivative of any mode.

    Differentiated, **raises** `TypeError` with the name of the operation and what to use `instead`.
    """
    message = f"{operation} has no second derivative: {instead}"

    def raise_by_name(tangent: Array) -> Array:
        raise TypeError(message)

    return _map_tangents(arrays, raise_by_name)


def refuse_reverse_over_reverse(cotangents: _Tree, operation: str, instead: str) -> _Tree:
    """Return the results of a backward rule that has a loop of unknown length, which JAX differentiates forward only.

    Differentiated in reverse mode, **raises** `TypeError` with the name of the operation and what to use `instead`.
    """
    message = (
        f"{operation} has no second derivative reverse over reverse, a jax.grad of a jax.grad, since its gradient is a "
        f"loop of unknown length. Take it forward over reverse, jax.jvp(jax.grad(f), ...), or {instead}"
    )
    return _map_tangents(cotangents, functools.partial(_forward_only.bind, message=message))


def refuse_forward_mode(operands: _Tree, operation: str, instead: str = _TWO_REVERSE) -> _Tree:
    """Return the operands of a custom VJP.

    Differentiated in forward mode, `jax.jvp(f, ...)`, **raises** `TypeError` with the name of the operation and what to
    use `instead`.
    """
    message = f"{operation} has no forward-mode derivative: {instead}"
    return _map_tangents(operands, functools.partial(_reverse_only.bind, message=message))


def run_in_rule(custom_vjp: Any, *args: Any) -> Any:
    """Call a custom VJP inside a rule, which needs its value and not its gradient: its function, as one equation."""
    count = len(custom_vjp.nondiff_argnums)
    return as_one_equation(functools.partial(custom_vjp.__wrapped__, *args[:count]), *args[count:])


def as_one_equation(function: Callable, *operands: Any) -> Any:
    """Call a function of arrays as one equation, as a custom VJP is one, which a rematerialization policy saves or
    recomputes as a whole, but with JAX's derivatives of both modes."""
    equation = jax.custom_jvp(function)
    equation.defjvp(functools.partial(jax.jvp, function))
    return equation(*operands)


def evaluate(function: Callable, *args: Any) -> Any:
    """Call a function inside a forward rule. The custom VJPs in the function run their own forward rules, which can be
    differentiated forward, where a custom VJP cannot."""
    return jax.vjp(function, *args)[0]


def _map_tangents(tree: _Tree, function: Callable[[Array], Array]) -> _Tree:
    """Return `tree`, with `function` applied to the tangents of its floating-point arrays."""

    @jax.custom_jvp
    def identity(x: Array) -> Array:
        return x

    identity.defjvp(lambda primals, tangents: (primals[0], function(tangents[0])))
    is_inexact = lambda x: isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)
    return jax.tree.map(lambda x: identity(x) if is_inexact(x) else x, tree)


def _raise_message(*_: Any, message: str) -> Any:
    raise TypeError(message)


def _make_identity(name: str, *, forward: Callable, transpose: Callable, lower: Callable) -> Primitive:
    """Make a primitive that is the identity on tangents where it does not raise."""
    primitive = Primitive(name)
    primitive.def_impl(forward)
    primitive.def_abstract_eval(lambda x, message: x)
    ad.deflinear2(primitive, transpose)
    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = lambda args, dims, message: (primitive.bind(*args, message=message), *dims)
    return primitive


_forward_only = _make_identity(
    "forward_only",
    forward=lambda x, message: x,
    transpose=_raise_message,
    lower=lambda context, x, message: [x],
)
"""Raises where it is transposed, in reverse mode."""
_reverse_only = _make_identity(
    "reverse_only",
    forward=_raise_message,
    transpose=lambda cotangent, x, message: [cotangent],
    lower=_raise_message,
)
"""Raises where it is computed, in forward mode. Transposed it vanishes."""
