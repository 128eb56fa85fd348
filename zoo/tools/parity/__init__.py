"""Compare a checkpoint's activations, logits and gradients with PyTorch's."""

from .compare import Comparison, ParityReport, compare, read_expectations

__all__ = ["Comparison", "ParityReport", "compare", "read_expectations"]
