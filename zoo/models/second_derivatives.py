"""Implementations for second derivatives: Hessian-vector products, gradient penalties, curvature."""

from typing import Any, TypeVar

import jax

from zoo.layers.quantized.fp8 import FP8Linear
from zoo.layers.quantized.packed import AbstractPackedLinear
from zoo.parallel import Module
from zoo.parallel.module import find_operations, replace_option

_Model = TypeVar("_Model")

_TWICE_DIFFERENTIABLE = {"attention": "grouped", "recurrence": "chunked", "grouped_matmul": "masked"}
"""For each kind of operation, the implementation that has second derivatives of both modes on every platform."""


def twice_differentiable(model: _Model) -> _Model:
    """Return `model` with implementations that have second derivatives. Its parameters are shared, and its results
    equal up to rounding.

        model = zoo.twice_differentiable(model)
        hessian_times_v = jax.jvp(jax.grad(loss), (model,), (v,))[1]

    Attention becomes "grouped", recurrences "chunked" and grouped matmuls "masked". A gradient of the model can then be
    differentiated forward, `jax.jvp(jax.grad(f), ...)`, and in reverse, `jax.grad` of a function of `jax.grad(f)`.
    Grouped attention holds all scores, and a masked product multiplies every row by every expert's matrix. Without
    cuDNN, splash attention and Pallas kernels, a model has the derivative forward over reverse as it is.

    A function given as attention stays, and so do the grouped matmuls of packed experts, which have the derivative
    forward over reverse only. The modes of every operation: docs/second-derivatives.md.

    **Raises** `ValueError` for layers with products in FP8 or FP4, which have no second derivative.
    """
    if any(isinstance(node, FP8Linear) for node in _flatten(model, FP8Linear)):
        raise ValueError(
            "twice_differentiable: the model has layers with products in FP8 or FP4, which have no second derivative. "
            "Give zoo.precision.remove_fp8(model)"
        )
    return jax.tree.map(_set_implementations, model, is_leaf=_has_operations)


def _flatten(tree: Any, cls: type) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, cls))


def _has_operations(node: Any) -> bool:
    return isinstance(node, Module) and bool(find_operations(node))


def _set_implementations(node: Any) -> Any:
    """Set the implementations of a module and of the modules in it; return other leaves as they are."""
    if not _has_operations(node):
        return node
    for name, operation in find_operations(node):
        chosen = _TWICE_DIFFERENTIABLE.get(operation.kind)
        if chosen and isinstance(getattr(node, name), str) and not _has_packed_experts(node, operation.kind):
            operation.check_name(chosen)
            node = replace_option(node, name, chosen)
    outer = node
    return jax.tree.map(_set_implementations, outer, is_leaf=lambda x: x is not outer and _has_operations(x))


def _has_packed_experts(node: Module, kind: str) -> bool:
    if kind != "grouped_matmul":
        return False
    return any(isinstance(each, AbstractPackedLinear) for each in _flatten(node, AbstractPackedLinear))
