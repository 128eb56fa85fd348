"""The weights of a model as a flat dict by path, and the model that is built from it again."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from zoo.models import Stack
from zoo.models.decoder import AbstractStack, UnrolledStack
from zoo.models.parameter_paths import walk_parameters
from zoo.models.stack import is_stack, swap_stack
from zoo.weights.safetensors import DTYPES


def unroll(model: Any) -> Any:
    """Return a model of NumPy arrays with an array per layer, views of the model's own where these are in memory. A
    decode step reads such arrays as they are; out of arrays that are stacked over layers it would copy slices.

    **Raises** `TypeError` for a stack of another class than `zoo.models.Stack`.
    """

    def unroll_stack(stack: AbstractStack) -> UnrolledStack:
        if isinstance(stack, UnrolledStack):
            return stack
        if not isinstance(stack, Stack):
            raise TypeError(f"export needs layers in a zoo.models.Stack, and the model has a {type(stack).__name__}")
        return stack.unstack()

    return swap_stack(jax.device_get(model), unroll_stack)


def name_weights(model: Any) -> list[str]:
    """Return the names of the arrays of an unrolled model, in the order of `jax.tree.leaves`: parameter paths with the
    number of the layer, `layers.3.attention.query.weight`. A star is the number of an expert, along the first dim.

    **Raises** `ValueError` for an array of a dtype that safetensors does not have.
    """
    names = list(_walk(model))
    for name, x in zip(names, jax.tree.leaves(model), strict=True):
        if np.dtype(x.dtype) not in DTYPES.values():
            raise ValueError(f"{name} is {x.dtype}, and a safetensors file has {', '.join(map(str, DTYPES.values()))}")
    return names


def _walk(model: Any) -> Iterator[str]:
    nodes = jax.tree.leaves(model, is_leaf=is_stack)
    for (name, _), node in zip(walk_parameters(model, "", (), is_stack), nodes, strict=True):
        if not isinstance(node, UnrolledStack):
            yield name
            continue
        for number, block in enumerate(node.blocks):
            yield from (path for path, _ in walk_parameters(block, f"layers.{number}", ()))
        for number, module in enumerate(node.shared):
            yield from (path for path, _ in walk_parameters(module, f"shared.{number}", ()))


def make_rebuild(model: Any, names: list[str]) -> Callable[[dict[str, Any]], PyTree]:
    """Return a function from a dict of weights to a model of the same structure."""
    treedef = jax.tree.structure(model)
    return lambda weights: jax.tree.unflatten(treedef, [weights[name] for name in names])
