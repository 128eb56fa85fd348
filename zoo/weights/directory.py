"""A checkpoint directory: its path, and the name of its config."""

import os
import re
from pathlib import Path

from .safetensors import CheckpointError

CONFIG_NAME = "config.json"


def resolve_directory(directory: str | Path) -> Path:
    """Return the directory as a path.

    **Raises** `CheckpointError` if it does not exist. For the name of a repository on the Hugging Face hub, the message
    shows how to download it.
    """
    path = Path(directory)
    if os.path.isdir(path):  # unlike `Path.is_dir`, False too for a name that is too long for the file system
        return path
    if os.path.exists(path):
        raise CheckpointError(f"{path} is a file: pass the directory that contains it and {CONFIG_NAME}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(directory)):
        raise CheckpointError(
            f"there is no directory {directory}. If that is a name on the Hugging Face hub: `pip install "
            f"huggingface_hub`, then `hf download {directory} --local-dir {path.name}`, and load {path.name!r}"
        )
    raise CheckpointError(f"there is no directory {directory}")
