"""Marks of the fields of modules, and the functions that declare a field with them.

A mark is a key in the metadata of a field. It says how the parameters below the field are named, cast, decayed, trained
and stacked.
"""

import re
from typing import Any

import equinox as eqx

from zoo.ops.implementations import Operation

STACKED = "zoo.stacked"
TRAINABLE = "zoo.trainable"
NAMED_BY_CLASS = "zoo.named_by_class"
IMPLEMENTATION_OPTION = "zoo.implementation_option"
WRAPPED = "zoo.wrapped"
PER_USE = "zoo.per_use"
ADAPTER_PARAMETER = "zoo.adapter_parameter"
OBSERVED = "zoo.observed"
FULL_PRECISION = "zoo.full_precision"
NO_WEIGHT_DECAY = "zoo.no_weight_decay"


def stacked(dim: str) -> Any:
    """Declare a field whose arrays have an additional leading dim `dim`: blocks stacked over `"layers"` for a scan."""
    return eqx.field(metadata={STACKED: dim})


def buffer(**options: Any) -> Any:
    """Declare a field of arrays that are not trained by gradient, as PyTorch's buffers: `trainable` omits them. On a
    field that holds a module it applies to all arrays of that module."""
    return eqx.field(metadata={TRAINABLE: False}, **options)


def observed(**options: Any) -> Any:
    """Declare a field of statistics of a step: maxima, 0 or more, which `value_and_grad(..., observe=True)` returns.

    An op with a custom VJP returns them as the cotangent of this array, such as the largest gradient that it has seen,
    which exists only in the backward pass. A module with such a field calls the op once. `trainable` omits the field,
    and `cast` leaves it as it is.
    """
    return eqx.field(metadata={TRAINABLE: False, OBSERVED: True}, **options)


def full_precision(**options: Any) -> Any:
    """Declare a field whose arrays keep their dtype under `cast`: norm scales, routers and whatever is used in float32.
    On a field that holds a module it applies to all arrays of that module."""
    return eqx.field(metadata={FULL_PRECISION: True}, **options)


def no_weight_decay(*, full_precision: bool = False) -> Any:
    """Declare a field of decay rates, or of one vector per head, channel or block: an array that is not a linear map,
    whatever its number of dims. `zoo.train.decay_mask` and `zoo.train.matrix_mask` exclude it.

    An array of one dim, not counting stacked ones, needs no declaration. `full_precision` keeps the dtype under `cast`.
    """
    return eqx.field(metadata={NO_WEIGHT_DECAY: True, FULL_PRECISION: full_precision})


def named_by_class() -> Any:
    """Declare a field that can hold different classes. Parameters below it are named by the class and not by the field,
    `attention.query.weight` instead of `mixer.query.weight`, to distinguish the classes."""
    return eqx.field(metadata={NAMED_BY_CLASS: True})


def implementation_option(operation: Operation | None = None, **options: Any) -> Any:
    """Declare a static field that selects an implementation without changing the result.

    With an `operation`, the field holds one of its names, which `__check_init__` checks and `set_implementations` sets,
    or a function.
    """
    return eqx.field(static=True, metadata={IMPLEMENTATION_OPTION: operation or True}, **options)


def wrapped() -> Any:
    """Declare a field that holds the module wrapped by this one. Parameters of the wrapped module keep their names;
    parameters in other fields of the wrapper are prefixed with its `adapter_name`."""
    return eqx.field(metadata={WRAPPED: True})


def per_use() -> Any:
    """Declare a field of a block with parameters of one call of a shared module (`zoo.models.Stack`). They are named
    after the module and the call, `shared.0.updates.*.down.weight` with the number of the call for the star, and not
    after the layer."""
    return eqx.field(metadata={PER_USE: True})


def adapter_parameter(*, full_precision: bool = False, no_weight_decay: bool = False) -> Any:
    """Declare a field of adapter parameters. If a tree has any, all its other parameters are frozen: `trainable` omits
    them. `full_precision` keeps the dtype under `cast`, and `no_weight_decay` is the declaration of that name."""
    metadata = {ADAPTER_PARAMETER: True, FULL_PRECISION: full_precision, NO_WEIGHT_DECAY: no_weight_decay}
    return eqx.field(metadata=metadata)


def to_snake_case(name: str) -> str:
    """Convert CamelCase to snake_case: `GatedMLP` -> `gated_mlp`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
