"""What every array of a model would be called if nothing were stacked: `layers.*.attention.query.weight`.

A star stands for the number of a layer or of an expert. Weight tables, adapters and tables of parameters speak these
names, so that none of them knows how layers were cut into segments.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from zoo.parallel import (
    IMPLEMENTATION_OPTION,
    NAMED_BY_CLASS,
    STACKED,
    TRAINABLE,
    WRAPPED,
    Dim,
    Leaf,
    Module,
    TrainableCopy,
    array_fields,
    leaves,
)

from .decoder import UnrolledStack
from .stack import Stack

IndexRanges = tuple[range, ...]


class ParameterPath(NamedTuple):
    """Where one array of a tree belongs. Its first dims are the stars of its name.

    `Place("layers.*.moe.experts.*.up.weight", (range(1, 32, 8), range(16)), ...)`: element [k, e] of the array is
    that of layer `range(1, 32, 8)[k]` and expert e.
    """

    name: str
    ranges: IndexRanges
    """What each star runs over."""
    leaf: Leaf

    @property
    def dims(self) -> tuple[Dim, ...]:
        return self.leaf.dims or ()


def list_parameter_paths(tree: PyTree) -> list[ParameterPath]:
    """A `Place` for every array, in JAX's order. Trees of a model's shape have its names: gradients, moments.

    **Raises** `TypeError` for a model whose layers were unstacked: their numbers are no longer in the tree.
    """
    return [
        ParameterPath(*named, leaf) for named, leaf in zip(walk_parameters(tree, "", ()), leaves(tree), strict=True)
    ]


def walk_parameters(
    node: Any, name: str, ranges: IndexRanges, is_leaf: Callable[[Any], bool] = lambda _: False
) -> Iterator[tuple[str, IndexRanges]]:
    """Name and numbers of every array, or, where it says so, of the node that `stop` stops at: in JAX's order, `stop`
    being its `is_leaf`."""
    if is_leaf(node):
        yield name, ranges
    elif isinstance(node, UnrolledStack):
        raise TypeError("the layers of this model stand one by one, to decode with: pass the model it was made from")
    elif isinstance(node, Stack):
        start = 0
        for segment in node.segments:
            period, repeats = len(segment.blocks), segment.num_repeats
            for place, block in enumerate(segment.blocks):
                run = range(start + place, start + period * repeats, period)
                yield from walk_parameters(block, _join_path(name, "*"), (*ranges, run), is_leaf)
            start += period * repeats
    elif isinstance(node, Module):
        around = any(WRAPPED in field.metadata for field in array_fields(node))
        for field in array_fields(node):
            child = getattr(node, field.name)
            if WRAPPED in field.metadata:
                yield from walk_parameters(child, name, ranges, is_leaf)
                continue
            word = "layers" if isinstance(child, Stack) else field.name
            word = to_snake_case(type(child).__name__) if NAMED_BY_CLASS in field.metadata else word
            word = _join_path(getattr(node, "adapter_name", ""), word) if around else word
            if STACKED in field.metadata and jax.tree.leaves(child):
                run = range(jax.tree.leaves(child)[0].shape[len(ranges)])
                yield from walk_parameters(child, _join_path(name, word, "*"), (*ranges, run), is_leaf)
            else:
                yield from walk_parameters(child, _join_path(name, word), ranges, is_leaf)
    elif isinstance(node, TrainableCopy):
        yield from walk_parameters(node.base, name, ranges, is_leaf)
        for word in ("array", "applies", "strength"):
            own = node.adapter_name if word == "array" else _join_path(node.adapter_name, word)
            yield from walk_parameters(getattr(node, word), _join_path(name, own), ranges, is_leaf)
    elif isinstance(node, tuple | list):
        for i, item in enumerate(node):
            yield from walk_parameters(item, _join_path(name, str(i)), ranges, is_leaf)
    else:
        yield from ((name, ranges) for _ in jax.tree.leaves(node))


def map_modules(function: Callable, tree: PyTree, is_leaf: Callable[[Any], bool]) -> PyTree:
    """`tree` with `function(name, numbers, module)` in place of every module that `stop` stops at, each with what its
    parameters' names begin with and what the stars in it run over."""
    found, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
    named = walk_parameters(tree, "", (), is_leaf)
    mapped = [function(*at, x) if is_leaf(x) else x for at, x in zip(named, found, strict=True)]
    return jax.tree.unflatten(treedef, mapped)


def _join_path(*words: str) -> str:
    return ".".join(filter(None, words))


def to_snake_case(name: str) -> str:
    """`GatedMLP` -> `gated_mlp`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def iterate_indices(ranges: IndexRanges) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every index into the stacked dims, with the numbers that it stands for."""
    for index in np.ndindex(*map(len, ranges)):
        yield index, tuple(run[i] for run, i in zip(ranges, index, strict=True))


def format_path(pattern: str, indices: tuple[int, ...]) -> str:
    """The name with a number for each star."""
    following = iter(indices)
    return re.sub(r"\*", lambda _: str(next(following)), pattern)


def find_differences(first: Any, second: Any, name: str = "") -> Iterator[str]:
    """Where two models would not compute the same of the same numbers: shapes, statics, kinds of layers. What only
    says how a result is computed (declared `manner()`) and the numbers themselves are not looked at. Nor are holes: a
    gradient has none of what is declared `buffer()`."""
    if _is_array(first) and _is_array(second):
        if first.shape != second.shape:
            yield f"{name} has the shape {list(first.shape)}, not {list(second.shape)}"
    elif type(first) is not type(second):
        yield f"{name or 'the model'} is {_format_value(first)}, not {_format_value(second)}"
    elif isinstance(first, Module):
        for field in dataclasses.fields(first):
            mine, theirs = getattr(first, field.name), getattr(second, field.name)
            hole = mine is None and not field.metadata.get(TRAINABLE, True)
            if IMPLEMENTATION_OPTION not in field.metadata and not hole:
                yield from find_differences(mine, theirs, _join_path(name, field.name))
    elif isinstance(first, tuple) and len(first) != len(second):
        yield f"{name} has {len(first)} parts, not {len(second)}"
    elif isinstance(first, tuple):
        for i, (mine, theirs) in enumerate(zip(first, second, strict=True)):
            yield from find_differences(mine, theirs, _join_path(name, str(i)))
    elif first != second:
        yield f"{name} is {_format_value(first)}, not {_format_value(second)}"


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _format_value(value: Any) -> str:
    if _is_array(value):
        return "an array"
    if isinstance(value, Module):
        return f"a {type(value).__name__}"
    return getattr(value, "__name__", None) or repr(value)
