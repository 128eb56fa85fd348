"""Compare with PyTorch: any two callables, a checkpoint's activations, logits and gradients, and training."""

from typing import TYPE_CHECKING

from zoo._moved import explain_moved_names

from .callables import compare
from .checkpoint import compare_checkpoint, read_expectations
from .training import compare_training

__all__ = ["compare", "compare_checkpoint", "compare_training", "read_expectations"]

_MOVED = {name: f"zoo.tools.parity.report.{name}" for name in ("Comparison", "ParityReport")}
if not TYPE_CHECKING:  # for a type checker every name would be an attribute
    __getattr__ = explain_moved_names(__name__, _MOVED)
