"""Modules whose annotations name the dims of their arrays, and the walk that reads those names.

A field declared `weight: Float[Array, "out in"]` says everything that the rest of the library needs: its shape is
checked against it, its sharding follows from it, weight decay and tables of parameters ask it. An instance may give a
dim of its annotation another name: a field `out: Dim` holding `Dim("heads", 64)` makes `"out"` the heads, 64 wide each.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, dataclass_transform

import equinox as eqx
import jax
from jaxtyping import AbstractArray, PyTree, jaxtyped

from .scope import SCOPED_METHODS, scoped
from .trainable_copy import TrainableCopy

STACKED, TRAINABLE, _FULL_PRECISION = "zoo.stacked", "zoo.learnt", "zoo.full_precision"
NAMED_BY_CLASS, IMPLEMENTATION_OPTION = "zoo.either", "zoo.manner"
WRAPPED, ADAPTER_PARAMETER = "zoo.transparent", "zoo.tuned"


@dataclasses.dataclass(frozen=True)
class Dim:
    """What one dim of an array is: a name that the layout knows, and how many elements are never cut apart.

    `Dim("heads", 64)` along a dim of 512 elements is 8 heads: the count is read off the array, so that it is right on
    a device's share too.
    """

    name: str
    unit: int = 1


def stacked(dim: str) -> Any:
    """A field below which every array has one more dim in front, called `dim`: blocks stacked over `"layers"`."""
    return eqx.field(metadata={STACKED: dim})


def buffer(**options: Any) -> Any:
    """A field of arrays that belong to a model's state but are not learnt by gradient: `trainable` omits them. Of a
    field that holds a module it holds for all below."""
    return eqx.field(metadata={TRAINABLE: False}, **options)


def full_precision(**options: Any) -> Any:
    """A field whose arrays keep their own dtype under `cast`: scales of norms, routers, anything used in float32. Of a
    field that holds a module it holds for all below."""
    return eqx.field(metadata={_FULL_PRECISION: True}, **options)


def named_by_class() -> Any:
    """A field that holds one of several classes. Parameters below it are named by the class, `attention.query.weight`,
    and not by the field, so that two classes in one place can be told apart."""
    return eqx.field(metadata={NAMED_BY_CLASS: True})


def implementation_option(**options: Any) -> Any:
    """A static field that says how a result is computed, not which: two modules that differ in it are one model."""
    return eqx.field(static=True, metadata={IMPLEMENTATION_OPTION: True}, **options)


def wrapped() -> Any:
    """A field that holds what a module was put around. Parameters below it keep the names that they had before; those
    of the module's other fields stand under its `label`."""
    return eqx.field(metadata={WRAPPED: True})


def adapter_parameter(*, full_precision: bool = False) -> Any:
    """A field that is learnt on top of a finished model, and, if it says so, keeps its own dtype under `cast`. Where a
    tree has any, `trainable` leaves out all else."""
    return eqx.field(metadata={ADAPTER_PARAMETER: True, _FULL_PRECISION: full_precision})


@dataclass_transform(
    field_specifiers=(
        *(dataclasses.field, eqx.field, stacked, buffer, full_precision, named_by_class, implementation_option),
        *(wrapped, adapter_parameter),
    )
)
class Module(eqx.Module):
    """The base of every class with parameters. Arrays are held against their annotations when an instance is made, and
    what an instance computes stands in a trace under its name (`zoo.parallel.scope`).

    **Raises** `TypeError` where a field holds an array but its annotation names no dims, or does not fit the array.
    """

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        for name in SCOPED_METHODS:
            method = vars(cls).get(name)
            if isinstance(method, types.FunctionType) and not getattr(method, "__isabstractmethod__", False):
                setattr(cls, name, scoped(method, NAMED_BY_CLASS))

    def __check_init__(self):
        arrays = [(field, x) for field in array_fields(self) for x in _find_bare_arrays(getattr(self, field.name))]
        with jaxtyped("context"):  # one scope for all fields: "out" is one number in the weight and in the bias
            for field, x in arrays:
                dims = _resolve_dims(self, field, x.ndim)
                if not any(isinstance(x, annotation) for annotation in _find_array_types(field.type)):
                    raise TypeError(_format_mismatch(self, field, x, arrays))
                for dim, size in zip(dims, x.shape, strict=True):
                    if size % dim.unit:
                        raise TypeError(
                            f"{type(self).__name__}.{field.name}: {size} elements are no whole number of {dim.name}, "
                            f"{dim.unit} elements each."
                        )


def _format_mismatch(
    module: Module, field: dataclasses.Field, x: Any, arrays: list[tuple[dataclasses.Field, Any]]
) -> str:
    shapes = ", ".join(f"{f.name} {list(array.shape)}" for f, array in arrays)
    return (
        f"{type(module).__name__}.{field.name} is {x.dtype.name}{list(x.shape)}, which does not fit its annotation "
        f"{_format_annotation(field.type)}. The arrays of this module: {shapes}."
    )


def array_fields(module: Module) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(module) if not field.metadata.get("static", False)]


def _find_bare_arrays(value: Any) -> list[Any]:
    """The arrays in a field's value that no module of its own describes."""
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, Module))
    return [x for x in leaves if eqx.is_array(x)]


def _find_array_types(annotation: Any) -> Iterator[Any]:
    """The jaxtyping types inside an annotation: `Float[Array, "out"] | None`, `tuple[Float[Array, "out"], ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _find_array_types(inner)


def _format_annotation(annotation: Any) -> str:
    names = [f'{t.dtype.__name__}[Array, "{t.dim_str}"]' for t in _find_array_types(annotation)]
    return " | ".join(names) or str(annotation)


def _resolve_dims(module: Module, field: dataclasses.Field, ndim: int) -> tuple[Dim, ...]:
    """The dims that a field's annotation names for an array of `ndim` dims, as this instance calls them."""
    place = f"{type(module).__name__}.{field.name}"
    if isinstance(field.type, str):
        raise TypeError(
            f"{place} is annotated with the string {field.type!r}: remove `from __future__ import annotations` and "
            "quotes around types from the file, so that the dims can be read."
        )
    named = {names for t in _find_array_types(field.type) if (names := _read_dim_names(t)) is not None}
    fitting = [names for names in named if len(names) == ndim]
    if len(fitting) != 1:
        raise TypeError(
            f"{place} holds an array of {ndim} dims, but its annotation {_format_annotation(field.type)} does not name {ndim} "
            'dims. Annotate it with one fixed name a dim: weight: Float[Array, "out in"].'
        )
    return tuple(_resolve_dim(module, name) for name in fitting[0])


def _read_dim_names(annotation: Any) -> tuple[str, ...] | None:
    """The names in one jaxtyping annotation, a number standing for itself; None where they are not fixed."""
    if not isinstance(annotation.dims, tuple):
        return None  # "..." alone
    names = [getattr(dim, "name", None) or getattr(dim, "size", None) for dim in annotation.dims]
    fixed = all(names) and "*" not in annotation.dim_str
    return tuple(map(str, names)) if fixed else None


def _resolve_dim(module: Module, name: str) -> Dim:
    own = getattr(module, name, None)
    own = own if isinstance(own, Dim) else getattr(module, f"{name}_", None)  # `in` is a keyword: the field is `in_`
    return own if isinstance(own, Dim) else Dim(name)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What the annotations say of one array of a tree."""

    name: str
    """The path to it: `stack.segments.0.blocks.0.mixer.query.weight`."""
    dims: tuple[Dim, ...] | None
    """One a dim of the array; None for a loose array, which stands in no module."""
    trainable: bool = True
    """Whether it is a parameter, and no buffer."""
    full_precision: bool = False
    adapter_parameter: bool = False
    frozen: bool = False
    """Whether other arrays of the tree are learnt on top of it."""


def leaves(tree: PyTree) -> list[Leaf]:
    """A `Leaf` for every leaf of `tree`, in JAX's order. Works on models, gradients, optimizer states, caches: on any
    tree in which modules occur.

    **Raises** `TypeError` where an array in a module is not what its annotation says.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = [_resolve_leaf(tree, path, x) for path, x in paths]
    if not any(leaf.adapter_parameter for leaf in found):
        return found
    return [dataclasses.replace(leaf, frozen=not leaf.adapter_parameter) for leaf in found]


def _resolve_leaf(tree: Any, path: tuple, array: Any) -> Leaf:
    node, words, front = tree, [], []
    owner, declared, numbers_of_whole = None, None, False
    learnt, full, tuned = True, False, False
    for step in path:
        word = str(next(getattr(step, a) for a in ("name", "key", "idx") if hasattr(step, a)))
        words.append(word)
        if isinstance(node, Module):
            owner, declared = node, next(f for f in dataclasses.fields(node) if f.name == word)
            front += [Dim(declared.metadata[STACKED])] if STACKED in declared.metadata else []
            learnt &= declared.metadata.get(TRAINABLE, True)
            full |= declared.metadata.get(_FULL_PRECISION, False)
            tuned |= declared.metadata.get(ADAPTER_PARAMETER, False)
        elif isinstance(node, TrainableCopy):
            tuned |= word == "array"
            numbers_of_whole = word in ("applies", "strength")
        node = _get_child(node, step, word)
    if owner is None or declared is None or not hasattr(array, "ndim"):
        return Leaf(".".join(words), None)
    if numbers_of_whole:
        return Leaf(".".join(words), tuple(front), trainable=False)
    try:
        dims = (*front, *_resolve_dims(owner, declared, array.ndim - len(front)))
    except TypeError as error:
        raise TypeError(f"{'.'.join(words)}: {error}") from None
    return Leaf(".".join(words), dims, learnt, full, tuned)


def _get_child(node: Any, step: Any, word: str) -> Any:
    if isinstance(step, jax.tree_util.GetAttrKey):
        return getattr(node, word)
    if isinstance(step, jax.tree_util.SequenceKey | jax.tree_util.DictKey):
        return node[getattr(step, "idx", getattr(step, "key", None))]
    children, _ = jax.tree_util.default_registry.flatten_one_level(node)
    return list(children)[step.key]


def map_leaves(function: Callable, tree: PyTree, *rest: PyTree) -> PyTree:
    """`jax.tree.map` whose function is told first what each leaf is: `function(leaf, x, *others)`."""
    values, treedef = jax.tree.flatten(tree)
    others = [treedef.flatten_up_to(other) for other in rest]
    return jax.tree.unflatten(treedef, list(map(function, leaves(tree), values, *others)))


def trainable(model: PyTree) -> PyTree:
    """The model with None for all that no gradient moves: integers, flags, what is declared `buffer()`, and, where any
    of it is declared `tuned()`, all that is not.

    This is what an optimizer, a gradient and a table of learnt parameters should see.
    """
    return map_leaves(lambda leaf, x: x if is_trainable(leaf, x) else None, model)


def is_trainable(leaf: Leaf, x: Any) -> bool:
    """A shape is learnt where the array that it stands for is."""
    return is_parameter(leaf, x) and not leaf.frozen


def is_parameter(leaf: Leaf, x: Any) -> bool:
    """Whether it is learnt, or was."""
    inexact = eqx.is_inexact_array(x)
    if isinstance(x, jax.ShapeDtypeStruct):
        inexact = jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)
    return leaf.trainable and inexact


def count(model: PyTree) -> int:
    """How many numbers a model learns: of a model in shapes only, too."""
    return sum(x.size for x in jax.tree.leaves(trainable(model)))
