"""Checkpoint directories in and out, by the families' tables of names."""

from .family_file import family_in
from .live import from_torch
from .load import load
from .save import save
from .tensors import CheckpointError

__all__ = ["CheckpointError", "family_in", "from_torch", "load", "save"]
