"""Dequantize the frozen linear layers of a model: float32 matrices of the same values."""

from typing import Any, TypeVar

from zoo.layers import AbstractLinear
from zoo.layers.quantized.groups import AbstractGroupLinear
from zoo.layers.quantized.linear import Int8Linear, NF4Linear
from zoo.layers.quantized.packed import AbstractPackedLinear
from zoo.models.parameter_paths import IndexRanges, map_modules
from zoo.models.targets import is_linear_site, vmap_stacked

from .base import get_base_layer, map_base_layer
from .merged_layers import require_unmerged

_Model = TypeVar("Model")
_PACKED_CLASSES = Int8Linear | NF4Linear | AbstractGroupLinear


def dequantize(model: _Model) -> _Model:
    """Replace every layer that `quantize` made, or that `zoo.load(packed=True)` read from a quantized file, with a
    float32 `Linear` of the same values, in 4 to 8 times the memory. **Raises** `ValueError` for a model whose adapters
    are merged."""
    require_unmerged(model)

    def dequantize_layer(base: AbstractLinear) -> AbstractLinear:
        if not isinstance(base, _PACKED_CLASSES):
            return base
        return base.to_linear(base.dense_weight, base.dense_bias)

    def dequantize_stacked(name: str, ranges: IndexRanges, module: Any) -> Any:
        if not isinstance(get_base_layer(module), AbstractPackedLinear):
            return module
        return vmap_stacked(map_base_layer(dequantize_layer), ranges)(module)

    return map_modules(dequantize_stacked, model, is_linear_site)
