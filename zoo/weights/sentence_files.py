"""Files of sentence-transformers in a checkpoint: `modules.json`, and the configs of the modules that it lists."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from zoo._files import parse_json, read_limited
from zoo.models.hf.spec import Origin
from zoo.models.text_embeddings import MODULES_FILE, find_pooling

from .safetensors import CheckpointError

_log = logging.getLogger("zoo")
_MAX_BYTES = 1_000_000
_COMPANION_FILES = ("config_sentence_transformers.json", "sentence_bert_config.json")


def read_sentence_files(directory: Path) -> tuple[tuple[str, str], ...]:
    """Return paths and texts of `modules.json`, its companions, and the config of each module; nothing without it.

    **Raises** `CheckpointError` for a damaged file, and for a module outside the directory.
    """
    if not os.path.exists(directory / MODULES_FILE):
        return ()
    try:
        modules = parse_json(read_limited(directory / MODULES_FILE, _MAX_BYTES))
        if not isinstance(modules, list) or not all(map(_is_module, modules)):
            raise ValueError("expected a list of modules, each with a type and a path")
        folders = [module["path"] for module in modules if module["path"]]
        if outside := [path for path in folders if path in (".", "..") or path != Path(path).name or "\\" in path]:
            raise ValueError(f"the path {outside[0]!r} is not a folder in this directory")
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{directory / MODULES_FILE} cannot be read: {error}") from None
    files = [MODULES_FILE, *_COMPANION_FILES, *(f"{folder}/config.json" for folder in folders)]
    return tuple((file, _read_json_text(directory / file)) for file in files if os.path.exists(directory / file))


def list_saved_files(origin: Origin) -> Mapping[str, str]:
    """Return paths and texts of the files to save with a model. If its modules have weights that were not loaded, warns
    and returns none, since a directory that lists these modules would be incomplete."""
    try:
        if origin.sentence_files:
            find_pooling(origin)
    except ValueError as error:
        _log.warning("%s is not saved, so the directory holds only the model: %s", MODULES_FILE, error)
        return {}
    return dict(origin.sentence_files)


def _is_module(module: object) -> bool:
    return isinstance(module, dict) and all(isinstance(module.get(key), str) for key in ("type", "path"))


def _read_json_text(path: Path) -> str:
    """**Raises** `CheckpointError` for a file that is not a JSON object or list."""
    try:
        content = read_limited(path, _MAX_BYTES)
        if not isinstance(parse_json(content), dict | list):
            raise ValueError("expected a JSON object")
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return content.decode()
