"""Load and save Hugging Face checkpoints through the families' name maps: safetensors, shards, tied weights, state
dicts."""

from .family_file import load_family
from .from_torch import from_torch
from .load import load
from .safetensors import CheckpointError
from .save import save

__all__ = ["CheckpointError", "from_torch", "load", "load_family", "save"]
