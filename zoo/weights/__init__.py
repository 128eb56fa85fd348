"""Load and save Hugging Face checkpoints through the families' name maps: safetensors, shards, tied weights, state
dicts. Read the parameters of other JAX libraries, and write them back."""

from .directory import resolve_directory
from .family_file import load_family
from .gemma import from_gemma, to_gemma
from .jax_files import read_msgpack, read_orbax
from .nested import read_tree, write_tree

__all__ = [
    "from_gemma",
    "load_family",
    "read_msgpack",
    "read_orbax",
    "read_tree",
    "resolve_directory",
    "to_gemma",
    "write_tree",
]
