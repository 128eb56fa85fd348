"""Parameter paths such as `layers.*.attention.query.weight`, independent of how layers are stacked for the scan.

A star is the number of a layer or of an expert. Name maps of checkpoints, adapter targets and parameter tables use
these paths, so that none of them depends on the split of layers into segments.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from zoo.parallel import Dim, Module, leaves
from zoo.parallel.fields import (
    IMPLEMENTATION_OPTION,
    NAMED_BY_CLASS,
    PER_USE,
    STACKED,
    TRAINABLE,
    WRAPPED,
    to_snake_case,
)
from zoo.parallel.module import Leaf, array_fields
from zoo.parallel.rounds import has_rounds, map_in_one_round, merge_rounds
from zoo.parallel.trainable_copy import TrainableCopy

from .decoder import UnrolledStack, find_shared_modules
from .restack import join_end_shapes
from .stack import Stack

IndexRanges = tuple[range, ...]
"""Layer and expert numbers of the stacked dims of an array."""


class ParameterPath(NamedTuple):
    """Path of one array of a tree. The leading dims of the array are the stars of its name; layers that `zoo.place` has
    dealt out in rounds have two dims for their one star, `rounds layers`, whose numbers go on from row to row.

    `ParameterPath("layers.*.moe.experts.*.up.weight", (range(1, 32, 8), range(16)), ...)`: element [k, e] of the array
    belongs to layer `range(1, 32, 8)[k]` and expert e.
    """

    name: str
    ranges: IndexRanges
    """Range of the numbers of each star."""
    leaf: Leaf

    @property
    def dims(self) -> tuple[Dim, ...]:
        """Named dims of the array; () outside of a `Module`."""
        return self.leaf.dims or ()

    def locate(self, index: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the index into the array, of this shape, for an index into the stars of the name: layers in rounds
        have one more dim."""
        if not has_rounds(self.leaf):
            return index
        return *divmod(index[0], shape[1]), *index[1:]


def list_parameter_paths(tree: PyTree) -> list[ParameterPath]:
    """Return the `ParameterPath` of every array, in the order of `jax.tree.leaves`. Trees of the same structure, such
    as gradients and optimizer moments, have the same paths, for any number of rounds.

    **Raises** `TypeError` for a model with an `UnrolledStack`, whose tree has no layer numbers.
    """
    paths = walk_parameters(tree, "", ())
    return [ParameterPath(*path, leaf) for path, leaf in zip(paths, leaves(tree), strict=True)]


def walk_parameters(
    node: Any,
    name: str,
    ranges: IndexRanges,
    is_leaf: Callable[[Any], bool] = lambda _: False,
    *,
    extra_dims: int = 0,
    call: tuple[str, range] | None = None,
) -> Iterator[tuple[str, IndexRanges]]:
    """Yield name and index ranges of every array, and of every node for which `is_leaf` is True, in the order of
    `jax.tree.leaves(node, is_leaf)`. `extra_dims` are the leading dims of the arrays of `node` that no range has: 1 in
    layers in rounds. `call` is the path of the shared module that a block calls, and the numbers of its calls."""
    walk = partial(walk_parameters, is_leaf=is_leaf, extra_dims=extra_dims, call=call)
    if is_leaf(node):
        yield name, ranges
    elif isinstance(node, UnrolledStack):
        raise TypeError("the layers of this model are unrolled, for decoding: pass the model it was made from")
    elif isinstance(node, Stack):
        start = 0
        calls = 0
        shared = _join_path(name.rpartition(".")[0], "shared")
        for segment in node.segments:
            period = len(segment.blocks)
            repeats = segment.num_repeats
            called = [next(iter(find_shared_modules(block)), None) for block in segment.blocks]
            callers = [i for i in range(period) if called[i] is not None]
            for i, block in enumerate(segment.blocks):
                layer_numbers = range(start + i, start + period * repeats, period)
                call = None
                if (module := called[i]) is not None:
                    numbers = range(calls + callers.index(i), calls + len(callers) * repeats, len(callers))
                    call = f"{shared}.{module.number}", numbers
                extra_dims = len(segment.layers) - 1
                path = _join_path(name, "*"), (*ranges, layer_numbers)
                yield from walk_parameters(block, *path, is_leaf, extra_dims=extra_dims, call=call)
            start += period * repeats
            calls += len(callers) * repeats
        for number, module in enumerate(node.shared):
            yield from walk_parameters(module, f"{shared}.{number}", ranges, is_leaf)
    elif isinstance(node, Module):
        is_wrapper = any(WRAPPED in field.metadata for field in array_fields(node))
        for field in array_fields(node):
            child = getattr(node, field.name)
            if WRAPPED in field.metadata:
                yield from walk(child, name, ranges)
                continue
            if PER_USE in field.metadata and call is not None:
                path, numbers = call
                yield from walk(child, _join_path(path, field.name, "*"), (*ranges[:-1], numbers))
                continue
            word = "layers" if isinstance(child, Stack) else field.name
            if NAMED_BY_CLASS in field.metadata:
                word = to_snake_case(type(child).__name__)
            if is_wrapper:
                word = _join_path(getattr(node, "adapter_name", ""), word)
            if STACKED in field.metadata and jax.tree.leaves(child):
                experts = range(jax.tree.leaves(child)[0].shape[len(ranges) + extra_dims])
                yield from walk(child, _join_path(name, word, "*"), (*ranges, experts))
            else:
                yield from walk(child, _join_path(name, word), ranges)
    elif isinstance(node, TrainableCopy):
        yield from walk(node.base, name, ranges)
        for word in ("array", "applies", "strength"):
            if word == "array":
                suffix = node.adapter_name
            else:
                suffix = _join_path(node.adapter_name, word)
            yield from walk(getattr(node, word), _join_path(name, suffix), ranges)
    elif isinstance(node, tuple | list):
        for i, item in enumerate(node):
            yield from walk(item, _join_path(name, str(i)), ranges)
    else:
        yield from ((name, ranges) for _ in jax.tree.leaves(node))


def list_parameters(tree: PyTree) -> list[tuple[ParameterPath, Any]]:
    """Return every array with its `ParameterPath`; each star of its name is one leading dim of the array."""
    tree = merge_rounds(tree)
    return list(zip(list_parameter_paths(tree), jax.tree.leaves(tree), strict=True))


def map_parameters(function: Callable[[ParameterPath, Any], Any], tree: PyTree) -> PyTree:
    """Replace every array of `list_parameters(tree)` by `function(path, array)`."""

    def map_arrays(tree: PyTree) -> PyTree:
        mapped = [function(path, x) for path, x in list_parameters(tree)]
        return jax.tree.unflatten(jax.tree.structure(tree), mapped)

    return map_in_one_round(map_arrays, tree)


def list_modules(tree: PyTree, is_leaf: Callable[[Any], bool]) -> list[tuple[str, IndexRanges, Any]]:
    """Return path, numbers of the stars, and module of every module for which `is_leaf` is True; each star is one
    leading dim of its arrays."""
    tree = merge_rounds(tree)
    nodes = jax.tree.leaves(tree, is_leaf=is_leaf)
    paths = walk_parameters(tree, "", (), is_leaf)
    return [(*path, node) for path, node in zip(paths, nodes, strict=True) if is_leaf(node)]


def map_modules(function: Callable, tree: PyTree, is_leaf: Callable[[Any], bool]) -> PyTree:
    """Replace every module of `list_modules(tree, is_leaf)` by `function(name, ranges, module)`."""

    def map_nodes(tree: PyTree) -> PyTree:
        nodes, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
        paths = walk_parameters(tree, "", (), is_leaf)
        mapped = [function(*path, x) if is_leaf(x) else x for path, x in zip(paths, nodes, strict=True)]
        return jax.tree.unflatten(treedef, mapped)

    return map_in_one_round(map_nodes, tree)


def _join_path(*words: str) -> str:
    return ".".join(filter(None, words))


def iterate_indices(ranges: IndexRanges) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield every index into the stacked dims, with the layer and expert numbers at that index."""
    for index in np.ndindex(*map(len, ranges)):
        yield index, tuple(numbers[i] for numbers, i in zip(ranges, index, strict=True))


def format_path(pattern: str, indices: tuple[int, ...]) -> str:
    """Replace the stars of a path by numbers."""
    remaining = iter(indices)
    return re.sub(r"\*", lambda _: str(next(remaining)), pattern)


def find_differences(first: Any, second: Any, name: str = "") -> Iterator[str]:
    """Yield the differences in architecture between two models: shapes, static fields, classes of layers.

    Values of arrays and `implementation_option()` fields are ignored, and so are missing buffers, which a gradient does
    not have, and how layers are dealt out: in rounds, or to the ends of a pipeline.
    """
    yield from _compare(_to_shapes(first), _to_shapes(second), name)


def _to_shapes(model: Any) -> Any:
    """Return a model with `jax.ShapeDtypeStruct`s in place of arrays, and its layers as they were built."""
    to_shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_array(x) else x
    return join_end_shapes(merge_rounds(jax.tree.map(to_shape, model)))


def _compare(first: Any, second: Any, name: str) -> Iterator[str]:
    if _is_array(first) and _is_array(second):
        if first.shape != second.shape:
            yield f"{name} has the shape {list(first.shape)}, not {list(second.shape)}"
    elif type(first) is not type(second):
        yield f"{name or 'the model'} is {_format_value(first)}, not {_format_value(second)}"
    elif isinstance(first, Module):
        for field in dataclasses.fields(first):
            child = getattr(first, field.name)
            other = getattr(second, field.name)
            is_missing_buffer = child is None and not field.metadata.get(TRAINABLE, True)
            if IMPLEMENTATION_OPTION not in field.metadata and not is_missing_buffer:
                yield from _compare(child, other, _join_path(name, field.name))
    elif isinstance(first, tuple) and len(first) != len(second):
        yield f"{name} has {len(first)} parts, not {len(second)}"
    elif isinstance(first, tuple):
        for i, (child, other) in enumerate(zip(first, second, strict=True)):
            yield from _compare(child, other, _join_path(name, str(i)))
    elif first != second:
        yield f"{name} is {_format_value(first)}, not {_format_value(second)}"


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _format_value(value: Any) -> str:
    if _is_array(value):
        return "an array"
    if isinstance(value, Module):
        return type(value).__name__
    return getattr(value, "__name__", None) or repr(value)
