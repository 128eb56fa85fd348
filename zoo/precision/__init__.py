"""Low precision: linear layers with products in FP8 or FP4, by a recipe; frozen weights quantized to 8 or 4 bits."""

from typing import TYPE_CHECKING, Any

from zoo.ops.quantized.blocks import BlockScaling
from zoo.ops.quantized.mxfp8 import MXFP8
from zoo.ops.quantized.nvfp4 import NVFP4
from zoo.ops.quantized.per_tensor import CurrentScaling, DelayedScaling
from zoo.ops.quantized.recipe import AbstractRecipe

from .delayed import update_amax
from .surgery import fp8, remove_fp8

if TYPE_CHECKING:
    from zoo.adapters import dequantize as dequantize
    from zoo.adapters import quantize as quantize

__all__ = [
    "MXFP8",
    "NVFP4",
    "AbstractRecipe",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "dequantize",
    "fp8",
    "quantize",
    "remove_fp8",
    "update_amax",
]


def __getattr__(name: str) -> Any:
    if name in ("dequantize", "quantize"):
        from zoo import adapters  # at first use: not every program needs adapters

        return getattr(adapters, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
