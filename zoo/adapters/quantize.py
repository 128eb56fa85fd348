"""Quantize the frozen linear layers of a model to 8 or 4 bits, as the base of adapters (QLoRA)."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from zoo.layers import AbstractLinear, Linear
from zoo.layers.quantized.groups import GroupQuantizedLinear, NVFP4Linear
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
from zoo.ops.quantized.nvfp4 import BLOCK_SIZE
from zoo.parallel import Dim

from .base import get_base_layer, map_base_layer
from .merged_layers import require_unmerged
from .names import translate_targets

_Model = TypeVar("Model")
PackedFormat = Literal["nf4", "int8", "nvfp4", "int4", "int3", "int2"]

_PACKED_LINEAR_CLASSES = {"nf4": NF4Linear, "int8": Int8Linear, "nvfp4": NVFP4Linear}
_LARGEST_CODES = {"int4": 7, "int3": 3, "int2": 1}
_CODES_PER_WORD = 8


def quantize(
    model: _Model, format: PackedFormat = "nf4", *, targets: Targets = "all-linear", group_size: int = 32
) -> _Model:
    """Quantize frozen linear layers to 4 bits (`NF4Linear`) or 8 bits (`Int8Linear`), the base of QLoRA (Dettmers et
    al., arXiv:2305.14314, section 3), or to formats that `zoo.save` writes for compressed-tensors: NVFP4
    (`NVFP4Linear`) and int4 (`GroupQuantizedLinear`). Quantized weights are not parameters: `zoo.trainable` omits
    them. Layers that have adapters are quantized beneath them.

    - `format`: "int3" and "int2" are codes of int4 with 7 and 3 levels, which take 4 bits in memory and in files.
    - `group_size`: consecutive inputs that share a scale in int4, int3 and int2.
    - `targets`: as in `lora`. `"all-linear"` excludes the head and layers that are declared in full precision, such as
      routers; name these to quantize them too.

    Stacked arrays are quantized sequentially; the caller's reference keeps the original model in memory. Rounding
    errors: `zoo.ops.quantized`. Memory: `zoo.inspect.measure_size`.

    **Raises** `ValueError` for another format, a model whose adapters are merged, a target that matches nothing, and,
    before anything is computed, one error for all layers that cannot be quantized: layers that are not a plain
    `Linear`, that are stacked with layers that `targets` exclude, or with inputs that are not whole blocks: of 64 in
    NF4, of 16 in NVFP4, of `group_size` in int4.
    """
    formats = [*_PACKED_LINEAR_CLASSES, *_LARGEST_CODES]
    if format not in formats:
        raise ValueError(f"matrices are quantized to {' or '.join(formats)}, not {format!r}")
    if group_size < 1 or group_size % _CODES_PER_WORD:
        raise ValueError(f"group_size={group_size}: expected a multiple of {_CODES_PER_WORD}, the codes of a word")
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
        f"{site.name}: {reason}"
        for site in selected
        for reason in _find_quantization_errors(site, is_target, format, group_size)
    ]:
        raise ValueError(f"these cannot be quantized to {format}:\n  " + "\n  ".join(errors))
    names = {site.name for site in selected}

    def quantize_layer(base: Linear) -> AbstractLinear:
        arrays = base.dense_weight, base.dense_bias
        dims = {"in_": base.in_, "out": base.out}
        if format in _PACKED_LINEAR_CLASSES:
            return _PACKED_LINEAR_CLASSES[format](*arrays, **dims)
        return GroupQuantizedLinear.quantize(*arrays, group_size=group_size, largest=_LARGEST_CODES[format], **dims)

    def quantize_stacked(name: str, ranges: IndexRanges, module: Any) -> Any:
        if name in names:
            return vmap_stacked(map_base_layer(quantize_layer), ranges)(module)
        return module

    return map_modules(quantize_stacked, model, is_linear_site)


def _find_quantization_errors(
    site: LinearSite, is_target: Callable[[str], bool], format: PackedFormat, group_size: int
) -> Iterator[str]:
    """Yield the reasons why a target module cannot be quantized."""
    base = get_base_layer(site.module)
    is_targeted = site.tabulate(is_target, bool)
    if not is_targeted.all():
        count = f"{is_targeted.sum()} of the {is_targeted.size} that are one array"
        yield f"targets mean {count}: all of them become integers, or none"
    if type(base) is not Linear:
        yield f"it is {type(base).__name__}, and no Linear"
    elif reason := _find_packing_error(format, group_size, site.get_shape()[1], base.in_):
        yield f"{reason}: take int8, or leave it out"


def _find_packing_error(format: PackedFormat, group_size: int, in_size: int, in_: Dim) -> str:
    if format in ("nf4", "int8"):
        return _PACKED_LINEAR_CLASSES[format].get_packing_error(in_size, in_)
    size = BLOCK_SIZE if format == "nvfp4" else group_size
    if in_size % size:
        return f"{format} has groups of {size} inputs, and {in_size} are not whole groups"
    return ""
