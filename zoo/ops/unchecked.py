"""Kernels of other libraries inside `shard_map`: without the check of varying axes, and with a gradient of their own.

Such a kernel does not say along which mesh axes its outputs vary, which JAX checks. It is a function of arrays that JAX
differentiates once, in reverse mode.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax._src import config  # JAX has no argument for it
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from .custom_vjps import refuse_forward_mode, refuse_second_derivative
from .varying import align_varying, vary, varying


def call_kernel(
    function: Callable,
    operands: tuple,
    *others: Any,
    refused: tuple[str, str],
    within: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Any:
    """Return `function(*operands, *others)`. All results vary over the mesh axes that any operand varies over.

    - `operands`: arrays with a gradient; None stays None.
    - `others`: arrays without one, such as segment ids.
    - `refused`: the operation, and what to use instead, for the errors of missing derivatives.
    - `within`: context in which the function is traced, forward and backward.
    """
    operands = refuse_forward_mode(operands, *refused)
    operands, others = align_varying(operands, others)
    dtypes = jax.tree.map(lambda x: x.dtype, operands)
    return _call_kernel(_Static(function, dtypes, refused, within), operands, others)


class _Static(NamedTuple):
    """The static arguments of both passes."""

    function: Callable
    dtypes: tuple
    """Dtypes of the operands, to which gradients are rounded: a kernel may return them in float32."""
    refused: tuple[str, str]
    within: Callable[[], contextlib.AbstractContextManager]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _call_kernel(static: _Static, operands: tuple, others: tuple) -> Any:
    """Run the kernel of operands that vary over the same mesh axes."""

    def run(operands: tuple, others: tuple) -> Any:
        return static.function(*operands, *others)

    with static.within():
        output = _run_unchecked(run, operands, others)
    return vary(output, _find_axes(operands))


def _call_kernel_fwd(static: _Static, operands: tuple, others: tuple) -> tuple[Any, Callable]:
    """Return the output, and the kernel's own backward pass."""

    def run(operands: tuple, others: tuple) -> tuple[Any, Callable]:
        return jax.vjp(lambda *x: static.function(*x, *others), *operands)

    operands = refuse_second_derivative(operands, *static.refused)
    with static.within():
        output, backward = _run_unchecked(run, operands, others)
    return vary(output, _find_axes(operands)), backward


def _call_kernel_bwd(static: _Static, backward: Callable, gradient: Any) -> tuple[Any, None]:
    """Run the kernel's backward pass."""
    axes = _find_axes(gradient)
    gradient = refuse_second_derivative(gradient, *static.refused)
    with static.within():
        gradients = _run_unchecked(lambda backward, gradient: backward(gradient), backward, gradient)
    gradients = jax.tree.map(lambda x, dtype: x.astype(dtype), gradients, static.dtypes)
    return vary(gradients, axes), None


_call_kernel.defvjp(_call_kernel_fwd, _call_kernel_bwd)


def _find_axes(tree: Any) -> frozenset[str]:
    return frozenset().union(*(varying(x) for x in jax.tree.leaves(tree)))


def _run_unchecked(function: Callable, *args: Any) -> Any:
    """Run a function of trees of arrays without the check of varying mesh axes. The types of the results name no
    axes."""
    with config._check_vma(False):
        return function(*jax.tree.map(_drop_varying.bind, args))


_drop_varying = Primitive("drop_varying")
"""The identity, with a result type that names no varying axes, as every result has without the check. A primitive,
since JAX evaluates the equations again, with the check, where it differentiates a scan over layers."""
_drop_varying.def_impl(lambda x: x)
_drop_varying.def_abstract_eval(lambda x: ShapedArray(x.shape, x.dtype, weak_type=x.weak_type))
mlir.register_lowering(_drop_varying, lambda context, x: [x])
batching.primitive_batchers[_drop_varying] = lambda args, dims: (_drop_varying.bind(*args), dims[0])
