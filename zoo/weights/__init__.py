"""Load and save Hugging Face checkpoints through the families' name maps: safetensors, shards, tied weights, state
dicts."""

from .directory import resolve_directory
from .family_file import load_family
from .from_torch import from_torch
from .load import load
from .safetensors import CheckpointError
from .save import NoFamilyError, save
from .to_torch import to_torch

__all__ = ["CheckpointError", "NoFamilyError", "from_torch", "load", "load_family", "resolve_directory", "save", "to_torch"]
