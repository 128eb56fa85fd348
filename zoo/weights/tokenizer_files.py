"""Find and copy the files of a checkpoint that make its tokenizer and its chat template."""

import os
from fnmatch import fnmatchcase
from pathlib import Path

from zoo._files import copy_file

from .safetensors import PICKLE_SUFFIXES

TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"),
    *("chat_template*", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
)
"""Patterns of their names, and of the files that say which tokens end a text, and how images become pixels."""


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy tokenizer, chat template and generation_config.json of a checkpoint to a directory, over older ones.

    Pickled files and links that leave `source` are left out.
    """
    for path in sorted(source.iterdir()):
        is_named = any(fnmatchcase(path.name, pattern) for pattern in TOKENIZER_FILES)
        is_plain = path.is_file() and path.suffix not in PICKLE_SUFFIXES and not leaves_directory(path, source)
        if not (is_named and is_plain):
            continue
        target = directory / path.name
        if not (target.exists() and target.samefile(path)):
            copy_file(path, target)


def has_tokenizer(directory: Path) -> bool:
    """Return True if a directory has a file that makes a tokenizer."""
    return any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json"))


def leaves_directory(path: Path, source: Path) -> bool:
    """Return True for a link to a file that does not belong to the checkpoint, say `README.md -> ~/.ssh/id_rsa`.

    In the cache of the Hugging Face hub a checkpoint is `snapshots/COMMIT/`, and its files are links to `blobs/`.
    """
    home = Path(os.path.realpath(source))
    target = Path(os.path.realpath(path))
    is_blob = home.parent.name == "snapshots" and target.parent == home.parents[1] / "blobs"
    return not (target.is_relative_to(home) or is_blob)
