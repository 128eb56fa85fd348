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
    EITHER,
    LEARNT,
    MANNER,
    STACKED,
    TRANSPARENT,
    Dim,
    Leaf,
    Learnt,
    Module,
    array_fields,
    leaves,
)

from .stack import Stack, Unstacked

Numbers = tuple[range, ...]


class Place(NamedTuple):
    """Where one array of a tree belongs. Its first dims are the stars of its name.

    `Place("layers.*.moe.experts.*.up.weight", (range(1, 32, 8), range(16)), ...)`: element [k, e] of the array is
    that of layer `range(1, 32, 8)[k]` and expert e.
    """

    name: str
    numbers: Numbers
    """What each star runs over."""
    leaf: Leaf

    @property
    def dims(self) -> tuple[Dim, ...]:
        return self.leaf.dims or ()


def places(tree: PyTree) -> list[Place]:
    """A `Place` for every array, in JAX's order. Trees of a model's shape have its names: gradients, moments.

    **Raises** `TypeError` for a model whose layers were unstacked: their numbers are no longer in the tree.
    """
    return [Place(*named, leaf) for named, leaf in zip(walk(tree, "", ()), leaves(tree), strict=True)]


def walk(
    node: Any, name: str, numbers: Numbers, stop: Callable[[Any], bool] = lambda _: False
) -> Iterator[tuple[str, Numbers]]:
    """Name and numbers of every array, or, where it says so, of the node that `stop` stops at: in JAX's order, `stop`
    being its `is_leaf`."""
    if stop(node):
        yield name, numbers
    elif isinstance(node, Unstacked):
        raise TypeError("the layers of this model stand one by one, to decode with: pass the model it was made from")
    elif isinstance(node, Stack):
        start = 0
        for segment in node.segments:
            period, repeats = len(segment.blocks), segment.whole
            for place, block in enumerate(segment.blocks):
                run = range(start + place, start + period * repeats, period)
                yield from walk(block, below(name, "*"), (*numbers, run), stop)
            start += period * repeats
    elif isinstance(node, Module):
        around = any(TRANSPARENT in field.metadata for field in array_fields(node))
        for field in array_fields(node):
            child = getattr(node, field.name)
            if TRANSPARENT in field.metadata:
                yield from walk(child, name, numbers, stop)
                continue
            word = "layers" if isinstance(child, Stack) else field.name
            word = in_snake_case(type(child).__name__) if EITHER in field.metadata else word
            word = below(getattr(node, "label", ""), word) if around else word
            if STACKED in field.metadata and jax.tree.leaves(child):
                run = range(jax.tree.leaves(child)[0].shape[len(numbers)])
                yield from walk(child, below(name, word, "*"), (*numbers, run), stop)
            else:
                yield from walk(child, below(name, word), numbers, stop)
    elif isinstance(node, Learnt):
        yield from walk(node.base, name, numbers, stop)
        for word in ("array", "applies", "weight"):
            own = node.label if word == "array" else below(node.label, word)
            yield from walk(getattr(node, word), below(name, own), numbers, stop)
    elif isinstance(node, tuple | list):
        for i, item in enumerate(node):
            yield from walk(item, below(name, str(i)), numbers, stop)
    else:
        yield from ((name, numbers) for _ in jax.tree.leaves(node))


def map_modules(function: Callable, tree: PyTree, stop: Callable[[Any], bool]) -> PyTree:
    """`tree` with `function(name, numbers, module)` in place of every module that `stop` stops at, each with what its
    parameters' names begin with and what the stars in it run over."""
    found, treedef = jax.tree.flatten(tree, is_leaf=stop)
    named = walk(tree, "", (), stop)
    mapped = [function(*at, x) if stop(x) else x for at, x in zip(named, found, strict=True)]
    return jax.tree.unflatten(treedef, mapped)


def below(*words: str) -> str:
    return ".".join(filter(None, words))


def in_snake_case(name: str) -> str:
    """`GatedMLP` -> `gated_mlp`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def each(numbers: Numbers) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every index into the stacked dims, with the numbers that it stands for."""
    for index in np.ndindex(*map(len, numbers)):
        yield index, tuple(run[i] for run, i in zip(numbers, index, strict=True))


def fill(pattern: str, numbers: tuple[int, ...]) -> str:
    """The name with a number for each star."""
    following = iter(numbers)
    return re.sub(r"\*", lambda _: str(next(following)), pattern)


def differences(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """Where two models would not compute the same of the same numbers: shapes, statics, kinds of layers. What only
    says how a result is computed (declared `manner()`) and the numbers themselves are not looked at. Nor are holes: a
    gradient has none of what is declared `buffer()`."""
    if is_array(one) and is_array(other):
        if one.shape != other.shape:
            yield f"{name} has the shape {list(one.shape)}, not {list(other.shape)}"
    elif type(one) is not type(other):
        yield f"{name or 'the model'} is {told(one)}, not {told(other)}"
    elif isinstance(one, Module):
        for field in dataclasses.fields(one):
            mine, theirs = getattr(one, field.name), getattr(other, field.name)
            hole = mine is None and not field.metadata.get(LEARNT, True)
            if MANNER not in field.metadata and not hole:
                yield from differences(mine, theirs, below(name, field.name))
    elif isinstance(one, tuple) and len(one) != len(other):
        yield f"{name} has {len(one)} parts, not {len(other)}"
    elif isinstance(one, tuple):
        for i, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            yield from differences(mine, theirs, below(name, str(i)))
    elif one != other:
        yield f"{name} is {told(one)}, not {told(other)}"


def is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def told(value: Any) -> str:
    if is_array(value):
        return "an array"
    if isinstance(value, Module):
        return f"a {type(value).__name__}"
    return getattr(value, "__name__", None) or repr(value)
