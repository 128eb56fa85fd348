"""Compare with PyTorch: any two callables, a checkpoint's activations, logits and gradients, and training."""

from .callables import compare
from .checkpoint import compare_checkpoint, read_expectations
from .training import compare_training

__all__ = ["compare", "compare_checkpoint", "compare_training", "read_expectations"]
