"""Load and save Hugging Face checkpoints through the families' name maps: safetensors, shards, tied weights, state
dicts. Read the parameters of other JAX libraries, and write them back."""

from .directory import resolve_directory
from .family_file import load_family
from .from_torch import from_torch
from .gemma import from_gemma, to_gemma
from .jax_files import read_msgpack, read_orbax
from .load import load
from .nested import read_tree, write_tree
from .safetensors import CheckpointError
from .save import NoFamilyError, save
from .to_torch import to_torch

__all__ = [
    "CheckpointError",
    "NoFamilyError",
    "from_gemma",
    "from_torch",
    "load",
    "load_family",
    "read_msgpack",
    "read_orbax",
    "read_tree",
    "resolve_directory",
    "save",
    "to_gemma",
    "to_torch",
    "write_tree",
]
