"""Low-precision training: linear layers whose products run in FP8 or FP4, by a recipe."""

from zoo.ops.quantized.per_tensor import CurrentScaling
from zoo.ops.quantized.recipe import AbstractRecipe

from .surgery import fp8, remove_fp8

__all__ = ["AbstractRecipe", "CurrentScaling", "fp8", "remove_fp8"]
