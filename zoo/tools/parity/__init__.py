"""Compare a checkpoint's activations, logits and gradients with PyTorch's."""

from typing import TYPE_CHECKING

from zoo._moved import explain_moved_names

from .compare import compare, read_expectations

__all__ = ["compare", "read_expectations"]

_MOVED = {name: f"zoo.tools.parity.compare.{name}" for name in ("Comparison", "ParityReport")}
if not TYPE_CHECKING:  # for a type checker every name would be an attribute
    __getattr__ = explain_moved_names(__name__, _MOVED)
