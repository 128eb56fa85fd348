"""Low precision: linear layers with products in FP8 or FP4, by a recipe; frozen weights quantized to 8 or 4 bits."""

from zoo.ops.quantized.blocks import BlockScaling
from zoo.ops.quantized.mxfp8 import MXFP8
from zoo.ops.quantized.nvfp4 import NVFP4
from zoo.ops.quantized.per_tensor import CurrentScaling, DelayedScaling

from .delayed import update_amax
from .surgery import fp8, remove_fp8

__all__ = ["MXFP8", "NVFP4", "BlockScaling", "CurrentScaling", "DelayedScaling", "fp8", "remove_fp8", "update_amax"]
