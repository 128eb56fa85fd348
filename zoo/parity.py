"""Parity with PyTorch, of two callables, of a checkpoint and of training: `zoo.tools.parity` by its promised name."""

from .tools.parity import compare, compare_checkpoint, compare_training, read_expectations

__all__ = ["compare", "compare_checkpoint", "compare_training", "read_expectations"]
