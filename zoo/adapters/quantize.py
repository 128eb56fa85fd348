"""The matrices of a finished model in 8 bits or in 4, for adapters to stand around."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax.numpy as jnp

from zoo.layers import AbstractLinear, AbstractPackedLinear, Int8Linear, Linear, NF4Linear
from zoo.models.parameter_paths import IndexRanges, list_parameter_paths, map_modules

from .base import AbstractAdapter
from .compose import get_base_layer
from .methods.dora import DoRA
from .targets import ALL_LINEAR, LinearSite, Targets, find_linears, is_linear_site, match_targets, vmap_stacked

_Model = TypeVar("Model")
_PackedFormat = Literal["nf4", "int8"]

_PACKED_LINEAR_CLASSES: dict[str, type[Int8Linear] | type[NF4Linear]] = {"nf4": NF4Linear, "int8": Int8Linear}


def quantize(model: _Model, format: _PackedFormat = "nf4", *, targets: Targets = "all-linear") -> _Model:
    """The model with its matrices rounded to 4 bits (`NF4Linear`) or to 8 (`Int8Linear`), which `zoo.trainable` omits:
    what QLoRA puts its adapters around (Dettmers et al., arXiv:2305.14314, section 3). Matrices that have adapters
    already are rounded beneath them.

    - `targets`: as `lora` has them. `"all-linear"` leaves out, beside the head, matrices that are declared to keep full
      precision, as a router's: name these to round them too.

    One stacked array is rounded after another; the model that was given lives as long as somebody holds it. How far
    numbers are off: `zoo.ops.nf4.encode`, `zoo.ops.int8.encode`. How much is left: `zoo.inspect.size`.

    **Raises** `ValueError` for another kind, for a target that means no matrix, and, before anything is computed and
    for all of them at once, for matrices that cannot be rounded: that are no plain `Linear`, that are stacked with
    layers that `targets` leave out, or, in NF4, whose inputs are no whole blocks of 64.
    """
    if format not in _PACKED_LINEAR_CLASSES:
        raise ValueError(f"matrices are quantized to {' or '.join(_PACKED_LINEAR_CLASSES)}, not {format!r}")
    found = find_linears(model)
    meant = match_targets(targets, found)
    kept = (
        {place.name for place in list_parameter_paths(model) if place.leaf.full_precision}
        if targets == ALL_LINEAR
        else set()
    )
    chosen = [one for one in found if f"{one.name}.weight" not in kept and one.tabulate(meant, bool).any()]
    if wrong := [f"{one.name}: {reason}" for one in chosen for reason in _find_quantization_errors(one, meant, format)]:
        raise ValueError(f"these cannot be quantized to {format}:\n  " + "\n  ".join(wrong))
    names = {one.name for one in chosen}
    made = lambda base: _PACKED_LINEAR_CLASSES[format](base.dense_weight, base.dense_bias, in_=base.in_, out=base.out)

    def one(name: str, numbers: IndexRanges, module: Any) -> Any:
        return vmap_stacked(_map_base_layer(made), numbers)(module) if name in names else module

    return map_modules(one, model, is_linear_site)


def _find_quantization_errors(
    site: LinearSite, is_target: Callable[[str], bool], format: _PackedFormat
) -> Iterator[str]:
    """Why a matrix that is meant cannot be quantized."""
    base, meant_here = get_base_layer(site.module), site.tabulate(is_target, bool)
    if not meant_here.all():
        count = f"{meant_here.sum()} of the {meant_here.size} that are one array"
        yield f"targets mean {count}: all of them become integers, or none"
    if type(base) is not Linear:
        yield f"it is a {type(base).__name__}, and no Linear"
    elif reason := _PACKED_LINEAR_CLASSES[format].get_packing_error(site.sizes()[1], base.in_):
        yield f"{reason}: take int8, or leave it out"


def dequantize(model: _Model) -> _Model:
    """The model with a float32 `Linear` in place of each matrix that `quantize` has rounded: of the same numbers, in 4
    to 8 times the memory."""

    def decoded(base: AbstractLinear) -> AbstractLinear:
        return base.to_linear(base.dense_weight, base.dense_bias) if isinstance(base, Int8Linear | NF4Linear) else base

    def one(name: str, numbers: IndexRanges, module: Any) -> Any:
        packed = isinstance(get_base_layer(module), AbstractPackedLinear)
        return vmap_stacked(_map_base_layer(decoded), numbers)(module) if packed else module

    return map_modules(one, model, is_linear_site)


def _map_base_layer(function: Callable[[Any], AbstractLinear]) -> Callable[[AbstractLinear], AbstractLinear]:
    """`function` of what lies under all adapters, which stay around it. What a DoRA knows of its base is found anew."""

    def one(module: AbstractLinear) -> AbstractLinear:
        if not isinstance(module, AbstractAdapter):
            return function(module)
        base = one(module.base)
        changed = eqx.tree_at(lambda adapter: adapter.base, module, base)
        if not isinstance(changed, DoRA):
            return changed
        return eqx.tree_at(lambda dora: dora.squares, changed, jnp.square(base.dense_weight).sum(-1))

    return one
