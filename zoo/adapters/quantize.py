"""Quantize the frozen linear layers of a model to 8 or 4 bits, as the base of adapters (QLoRA)."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from zoo.layers import AbstractLinear, Linear
from zoo.layers.quantized.linear import Int8Linear, NF4Linear
from zoo.models.parameter_paths import IndexRanges, list_parameter_paths, map_modules
from zoo.models.targets import (
    ALL_LINEAR,
    LinearSite,
    Targets,
    find_linears,
    is_linear_site,
    match_targets,
    vmap_stacked,
)

from .base import get_base_layer, map_base_layer
from .merged_layers import require_unmerged
from .names import translate_targets

_Model = TypeVar("Model")
PackedFormat = Literal["nf4", "int8"]

_PACKED_LINEAR_CLASSES: dict[str, type[Int8Linear] | type[NF4Linear]] = {"nf4": NF4Linear, "int8": Int8Linear}


def quantize(model: _Model, format: PackedFormat = "nf4", *, targets: Targets = "all-linear") -> _Model:
    """Quantize frozen linear layers to 4 bits (`NF4Linear`) or 8 bits (`Int8Linear`), the base of QLoRA (Dettmers et
    al., arXiv:2305.14314, section 3). Quantized weights are not parameters: `zoo.trainable` omits them. Layers that
    have adapters are quantized beneath them.

    - `targets`: as in `lora`. `"all-linear"` excludes the head and layers that are declared in full precision, such as
      routers; name these to quantize them too.

    Stacked arrays are quantized sequentially; the caller's reference keeps the original model in memory. Rounding
    errors: `zoo.ops.quantized`. Memory: `zoo.inspect.measure_size`.

    **Raises** `ValueError` for another format, a model whose adapters are merged, a target that matches nothing, and,
    before anything is computed, one error for all layers that cannot be quantized: layers that are not a plain
    `Linear`, that are stacked with layers that `targets` exclude, or, in NF4, with inputs that are not whole blocks of
    64.
    """
    if format not in _PACKED_LINEAR_CLASSES:
        raise ValueError(f"matrices are quantized to {' or '.join(_PACKED_LINEAR_CLASSES)}, not {format!r}")
    require_unmerged(model)
    sites = find_linears(model)
    is_target = match_targets(translate_targets(model, targets, sites), sites)
    if targets == ALL_LINEAR:
        full_precision = {path.name for path in list_parameter_paths(model) if path.leaf.full_precision}
    else:
        full_precision = set()
    selected = [
        site for site in sites if f"{site.name}.weight" not in full_precision and site.tabulate(is_target, bool).any()
    ]
    if errors := [
        f"{site.name}: {reason}" for site in selected for reason in _find_quantization_errors(site, is_target, format)
    ]:
        raise ValueError(f"these cannot be quantized to {format}:\n  " + "\n  ".join(errors))
    names = {site.name for site in selected}

    def quantize_layer(base: Linear) -> AbstractLinear:
        return _PACKED_LINEAR_CLASSES[format](base.dense_weight, base.dense_bias, in_=base.in_, out=base.out)

    def quantize_stacked(name: str, ranges: IndexRanges, module: Any) -> Any:
        if name in names:
            return vmap_stacked(map_base_layer(quantize_layer), ranges)(module)
        return module

    return map_modules(quantize_stacked, model, is_linear_site)


def _find_quantization_errors(
    site: LinearSite, is_target: Callable[[str], bool], format: PackedFormat
) -> Iterator[str]:
    """Yield the reasons why a target module cannot be quantized."""
    base = get_base_layer(site.module)
    is_targeted = site.tabulate(is_target, bool)
    if not is_targeted.all():
        count = f"{is_targeted.sum()} of the {is_targeted.size} that are one array"
        yield f"targets mean {count}: all of them become integers, or none"
    if type(base) is not Linear:
        yield f"it is {type(base).__name__}, and no Linear"
    elif reason := _PACKED_LINEAR_CLASSES[format].get_packing_error(site.get_shape()[1], base.in_):
        yield f"{reason}: take int8, or leave it out"
