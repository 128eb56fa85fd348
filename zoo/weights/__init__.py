"""Checkpoint directories in and out, by the families' tables of names."""

from .live import from_torch
from .load import load
from .save import save
from .tensors import CheckpointError

__all__ = ["CheckpointError", "from_torch", "load", "save"]
