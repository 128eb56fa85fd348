"""Base class of modules with annotated array dims, and the traversal of parameters with their dims.

The annotation of a field, `weight: Float[Array, "out in"]`, is also its sharding: shape checks, PartitionSpecs, weight
decay and tables of parameters are derived from it. An instance can rename a dim of the annotation: a field `out: Dim`
with the value `Dim("heads", 64)` turns `"out"` into heads of size 64.
"""

import copy
import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, dataclass_transform

import equinox as eqx
import jax
from jaxtyping import PyTree, jaxtyped

from zoo.ops.implementations import Operation

from .dims import Dim, find_array_types, read_dim_names, resolve_dim
from .fields import (
    ADAPTER_PARAMETER,
    FULL_PRECISION,
    IMPLEMENTATION_OPTION,
    NO_WEIGHT_DECAY,
    OBSERVED,
    STACKED,
    TRAINABLE,
    adapter_parameter,
    buffer,
    full_precision,
    implementation_option,
    named_by_class,
    no_weight_decay,
    observed,
    per_use,
    stacked,
    wrapped,
)
from .scope import SCOPED_METHODS, scoped
from .trainable_copy import TrainableCopy

_Module = TypeVar("_Module")


def find_operations(module: Any) -> list[tuple[str, Operation]]:
    """Return each field of a module that selects an implementation of an operation, and the operation."""
    found = [(field.name, field.metadata.get(IMPLEMENTATION_OPTION)) for field in dataclasses.fields(module)]
    return [(name, operation) for name, operation in found if isinstance(operation, Operation)]


def replace_option(module: _Module, name: str, value: Any) -> _Module:
    """Return a copy of a module with another value of one `implementation_option()`."""
    module = copy.copy(module)
    object.__setattr__(module, name, value)  # safe: nobody else holds this copy
    return module


@dataclass_transform(
    field_specifiers=(
        *(dataclasses.field, eqx.field, stacked, buffer, observed, full_precision, no_weight_decay),
        *(named_by_class, implementation_option, wrapped, per_use, adapter_parameter),
    )
)
class Module(eqx.Module):
    """Base class of every module with parameters. `__check_init__` checks arrays against their annotations, and methods
    run in a `jax.named_scope` (`zoo.parallel.scope`). It prints the names and dims of its parameters
    (`zoo.parallel.printing`).

    **Raises** `TypeError` if the annotation of an array names no dims or does not match the array; `ValueError` for an
    unknown implementation.
    """

    hides_value = False
    """True if `zoo.capture` has no value of this module. No annotation: Equinox would read it again in each class."""
    holds_layers = False
    """True if names of values and parameters have `layers.*` for this module and its layers."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        for name in SCOPED_METHODS:
            method = vars(cls).get(name)
            if isinstance(method, types.FunctionType) and not getattr(method, "__isabstractmethod__", False):
                setattr(cls, name, scoped(method))

    def __check_init__(self):
        for field, operation in find_operations(self):
            if isinstance(name := getattr(self, field), str):
                operation.check_name(name)
        arrays = [(field, x) for field in array_fields(self) for x in _find_bare_arrays(getattr(self, field.name))]
        with jaxtyped("context"):  # one scope for all fields: "out" has the same size in the weight and in the bias
            for field, x in arrays:
                dims = resolve_dims(self, field, x.ndim)
                if not any(isinstance(x, annotation) for annotation in find_array_types(field.type)):
                    raise TypeError(_format_mismatch(self, field, x, arrays))
                for dim, size in zip(dims, x.shape, strict=True):
                    if size % dim.unit:
                        raise TypeError(
                            f"{type(self).__name__}.{field.name}: {size} elements are not a whole number of "
                            f"{dim.name}, {dim.unit} elements each."
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
    """Return the arrays in a field's value that are not inside another module."""
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, Module))
    return [x for x in leaves if eqx.is_array(x)]


def _format_annotation(annotation: Any) -> str:
    names = [f'{t.dtype.__name__}[Array, "{t.dim_str}"]' for t in find_array_types(annotation)]
    return " | ".join(names) or str(annotation)


def resolve_dims(module: Module, field: dataclasses.Field, ndim: int) -> tuple[Dim, ...]:
    """Return the dims that a field's annotation names for an array of `ndim` dims, as renamed by this instance. A field
    `array_dims` names all dims of the field `array`."""
    if (names := getattr(module, f"{field.name}_dims", None)) is not None:
        return tuple(name if isinstance(name, Dim) else Dim(name) for name in names)
    field_name = f"{type(module).__name__}.{field.name}"
    matching = [names for names in _find_dim_names(field) if len(names) == ndim]
    if isinstance(field.type, str):
        raise TypeError(
            f"{field_name} is annotated with the string {field.type!r}: remove `from __future__ import annotations` "
            "and quotes around types from the file, so that the dims can be read."
        )
    if len(matching) != 1:
        _refuse_other_modules(getattr(module, field.name), field, field_name)
        raise TypeError(
            f"{field_name} holds an array of {ndim} dims, but its annotation {_format_annotation(field.type)} does not "
            f"name {ndim} dims. "
            'Annotate it with one fixed name per dim: weight: Float[Array, "out in"].'
        )
    return tuple(resolve_dim(module, name) for name in matching[0])


def _refuse_other_modules(value: Any, field: dataclasses.Field, field_name: str) -> None:
    """**Raises** `TypeError` for a module in a field's value that is not a `Module`, such as Equinox's own layers."""
    for node in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, eqx.Module)):
        if isinstance(node, eqx.Module) and not isinstance(node, Module):
            wanted = "zoo.parallel.Module"
            if isinstance(field.type, type) and issubclass(field.type, Module):
                wanted = field.type.__name__
            public = type(node).__module__.partition("._")[0]
            raise TypeError(
                f"{field_name}: expected {wanted}, got {public}.{type(node).__name__}, whose arrays have no named "
                "dims: the page Add a layer shows how to write one"
            )


def _find_dim_names(field: dataclasses.Field) -> set[tuple[str, ...]]:
    """Return the dim names of each alternative in a field's annotation."""
    return {names for t in find_array_types(field.type) if (names := read_dim_names(t)) is not None}


def _resolve_state_dims(
    module: Module, field: dataclasses.Field, stacked_dims: Sequence[Dim], ndim: int
) -> tuple[Dim, ...] | None:
    """Return the dims of an array that an optimizer keeps in the place of a parameter, and None for fewer dims than the
    parameter has: optax.adafactor's rows and columns do not say which dims were averaged.

    More dims are leading ones, such as the history of optax.lbfgs.
    """
    alternatives = _find_dim_names(field)
    if len(alternatives) != 1:
        return None
    dims = (*stacked_dims, *(resolve_dim(module, name) for name in next(iter(alternatives))))
    return (Dim("history"),) * (ndim - len(dims)) + dims if ndim > len(dims) else None


def resolve_stacked_dims(module: Module, name: str) -> Sequence[Dim]:
    """Return the leading dims of a `stacked` field: one dim, or the dims of a tuple in the field of that name."""
    dims = getattr(module, name, None)
    return dims if isinstance(dims, tuple) else [resolve_dim(module, name)]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Metadata of one array of a tree, read from the annotations of the modules that contain it."""

    name: str
    """Path to the array: `stack.segments.0.blocks.0.mixer.query.weight`."""
    dims: tuple[Dim, ...] | None
    """Dims of the array; None for an array that is not in a module."""
    trainable: bool = True
    """False for a buffer."""
    full_precision: bool = False
    adapter_parameter: bool = False
    frozen: bool = False
    """True if the tree has adapter parameters and this array is not one of them."""
    observed: bool = False
    """True for a statistic, whose gradient is the maximum of the values seen."""
    no_weight_decay: bool = False
    in_optimizer_state: bool = False
    """True below a named tuple, as optax's states are: an optimizer may keep an array of another shape in the place of
    a parameter."""
    fits: bool = True
    """False for an array of an optimizer state that does not have the number of dims of its annotation."""
    num_stacked: int = 0
    """Number of leading dims along which modules are stacked: layers, experts, heads of a norm per head."""
    owner: type | None = None
    """Class of the module that holds the array; None for an array that is not in a module."""
    field: str | None = None
    """Name of the owner's field that holds the array: `weight`."""

    @property
    def unstacked_dims(self) -> tuple[Dim, ...] | None:
        """Dims of the array of a single module of the stack; None for an array that is not in a module."""
        return None if self.dims is None else self.dims[self.num_stacked :]


def leaves(tree: PyTree) -> list[Leaf]:
    """Return a `Leaf` for every leaf of `tree`, in the order of `jax.tree.leaves`.

    `tree` is any pytree that contains modules: a model, gradients, optimizer state, KV caches. In an optimizer state an
    array with fewer dims than its parameter has no dims here.

    **Raises** `TypeError` if any other array in a module does not match its annotation.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    resolved = [_resolve_leaf(tree, path, x) for path, x in paths]
    if not any(leaf.adapter_parameter for leaf in resolved):
        return resolved
    return [dataclasses.replace(leaf, frozen=not leaf.adapter_parameter) for leaf in resolved]


def _resolve_leaf(tree: Any, path: tuple, array: Any) -> Leaf:
    """Walk from the root of `tree` to `array` and collect the metadata of the fields on the path."""
    node = tree
    keys = []
    stacked_dims = []
    owner = None
    is_copy_scalar = False
    leaf = Leaf("", None)
    for step in path:
        key = str(next(getattr(step, a) for a in ("name", "key", "idx") if hasattr(step, a)))
        keys.append(key)
        if isinstance(node, Module):
            owner = node
            field = next(f for f in dataclasses.fields(node) if f.name == key)
            leaf = _add_marks(leaf, node, field)
            if STACKED in field.metadata:
                stacked_dims += resolve_stacked_dims(node, field.metadata[STACKED])
        elif isinstance(node, TrainableCopy):
            leaf = dataclasses.replace(leaf, adapter_parameter=leaf.adapter_parameter or key == "array")
            is_copy_scalar = key in ("applies", "strength")
        elif owner is None and hasattr(node, "_fields"):
            leaf = dataclasses.replace(leaf, in_optimizer_state=True)
        node = _get_child(node, step, key)
    name = ".".join(keys)
    if owner is None or leaf.field is None or not hasattr(array, "ndim"):
        return Leaf(name, None)
    if is_copy_scalar:
        return Leaf(name, tuple(stacked_dims), trainable=False, num_stacked=len(stacked_dims))
    leaf = dataclasses.replace(leaf, name=name, num_stacked=len(stacked_dims))
    field = next(f for f in dataclasses.fields(owner) if f.name == leaf.field)
    try:
        dims = (*stacked_dims, *resolve_dims(owner, field, array.ndim - len(stacked_dims)))
    except TypeError as error:
        if leaf.in_optimizer_state:
            dims = _resolve_state_dims(owner, field, stacked_dims, array.ndim)
            return dataclasses.replace(leaf, dims=dims, fits=False)
        if isinstance(tree, Module):
            hint = ""
        else:
            hint = " The state of an optimizer is a named tuple, as in optax."
        raise TypeError(f"{name}: {error}{hint}") from None
    return dataclasses.replace(leaf, dims=dims)


def _add_marks(leaf: Leaf, owner: Module, field: dataclasses.Field) -> Leaf:
    """Add the marks of a field on the path to an array, and name it as the field that holds the array."""
    marks = field.metadata
    return dataclasses.replace(
        leaf,
        trainable=leaf.trainable and marks.get(TRAINABLE, True),
        full_precision=leaf.full_precision or marks.get(FULL_PRECISION, False),
        adapter_parameter=leaf.adapter_parameter or marks.get(ADAPTER_PARAMETER, False),
        observed=leaf.observed or marks.get(OBSERVED, False),
        no_weight_decay=leaf.no_weight_decay or marks.get(NO_WEIGHT_DECAY, False),
        owner=type(owner),
        field=field.name,
    )


def _get_child(node: Any, step: Any, key: str) -> Any:
    if isinstance(step, jax.tree_util.GetAttrKey):
        return getattr(node, key)
    if isinstance(step, jax.tree_util.SequenceKey | jax.tree_util.DictKey):
        return node[getattr(step, "idx", getattr(step, "key", None))]
    children, _ = jax.tree_util.default_registry.flatten_one_level(node)
    return list(children)[step.key]


def map_leaves(function: Callable, tree: PyTree, *rest: PyTree) -> PyTree:
    """`jax.tree.map` with the `Leaf` of each array as first argument: `function(leaf, x, *others)`."""
    values, treedef = jax.tree.flatten(tree)
    others = [treedef.flatten_up_to(other) for other in rest]
    return jax.tree.unflatten(treedef, list(map(function, leaves(tree), values, *others)))


def trainable(model: PyTree) -> PyTree:
    """Return the model with None in place of every array that is not trainable.

    These are integers, booleans and fields declared `buffer()`; if the model has adapters, also every parameter that is
    not declared `adapter_parameter()`. Optimizers and tables of trainable parameters take the result.

    **Raises** `ValueError` for a model whose adapters are merged but kept next to the weights: nothing would be
    trained.
    """

    def select(leaf: Leaf, x: Any) -> Any:
        if leaf.adapter_parameter and not leaf.trainable:
            raise ValueError(
                f"{leaf.name}: the adapters of this model are merged into its weights and kept beside them (merge with "
                "keep=True), and nothing of it is trained: call zoo.adapters.unmerge(model) first"
            )
        return x if is_trainable(leaf, x) else None

    return map_leaves(select, model)


def is_trainable(leaf: Leaf, x: Any) -> bool:
    """Return True for a trainable array, or for the `jax.ShapeDtypeStruct` of one."""
    return is_parameter(leaf, x) and not leaf.frozen


def is_parameter(leaf: Leaf, x: Any) -> bool:
    """Return True for a parameter, trainable or frozen, or for the `jax.ShapeDtypeStruct` of one."""
    inexact = eqx.is_inexact_array(x)
    if isinstance(x, jax.ShapeDtypeStruct):
        inexact = jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)
    return leaf.trainable and inexact


def is_differentiated(leaf: Leaf, x: Any) -> bool:
    """Return True for an array with respect to which `value_and_grad` differentiates: trainable, or observed."""
    return leaf.observed or is_trainable(leaf, x)


def count(model: PyTree) -> int:
    """Count the trainable parameters of a model, or of a model of `jax.ShapeDtypeStruct`s."""
    return sum(x.size for leaf, x in zip(leaves(model), jax.tree.leaves(model), strict=True) if is_trainable(leaf, x))
