"""Low-precision training: linear layers whose products run in FP8, by a recipe."""

from zoo.ops.quantized.blocks import BlockScaling
from zoo.ops.quantized.mxfp8 import MXFP8
from zoo.ops.quantized.nvfp4 import NVFP4
from zoo.ops.quantized.per_tensor import CurrentScaling, DelayedScaling
from zoo.ops.quantized.recipe import AbstractRecipe

from .delayed import update_amax
from .surgery import fp8, remove_fp8

__all__ = [
    "MXFP8",
    "NVFP4",
    "AbstractRecipe",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "fp8",
    "remove_fp8",
    "update_amax",
]
