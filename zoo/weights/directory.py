"""A directory as model hubs have them: config.json, and tensors in one safetensors file or in shards with an index."""

import json
import os
import re
from pathlib import Path
from typing import Any

from zoo.models.hf.config import suggest_nearest
from zoo.models.hf.families import FAMILIES, families
from zoo.models.hf.spec import Family

from .safetensors import CheckpointError, LazyTensor, open_safetensors, reject_duplicate_keys

CONFIG_NAME, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
)
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def resolve_directory(directory: str | Path) -> Path:
    """The directory itself. **Raises** `CheckpointError` where there is none; of a name on a hub it says how it is
    downloaded."""
    path = Path(directory)
    if os.path.isdir(path):  # unlike Path's own, False too where a name is too long for the file system
        return path
    if os.path.exists(path):
        raise CheckpointError(f"{path} is a file: pass the directory that holds it and {CONFIG_NAME}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(directory)):
        raise CheckpointError(
            f"there is no directory {directory}. If that is a name on the Hugging Face hub: `pip install "
            f"huggingface_hub`, then `hf download {directory} --local-dir {path.name}`, and load {path.name!r}"
        )
    raise CheckpointError(f"there is no directory {directory}")


def read_json(path: Path) -> dict[str, Any]:
    """**Raises** `CheckpointError` for a file that is missing, damaged, or no table."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=reject_duplicate_keys)
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: a table of keys and values was expected")
    return found


def find_family(config: dict[str, Any], path: Path) -> Family:
    """**Raises** `CheckpointError` for a `model_type` that we do not have, with the nearest that we do."""
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    told = f"has the model_type {name!r}" if name is not None else "has no model_type"
    hint = suggest_nearest(str(name), FAMILIES) or "."
    raise CheckpointError(f"{path} {told}{hint} Families that can be read: {', '.join(families())}")


def open_tensors(directory: Path) -> dict[str, LazyTensor]:
    """Every tensor of a checkpoint, by name; nothing is read but headers.

    **Raises** `CheckpointError` where there is no safetensors file, where one is damaged, and where an index leaves the
    directory or does not agree with its shards.
    """
    if os.path.isfile(directory / SAFE_WEIGHTS_NAME):
        return open_safetensors(directory / SAFE_WEIGHTS_NAME)
    if os.path.isfile(directory / SAFE_WEIGHTS_INDEX_NAME):
        return _open_shards(directory)
    there = sorted(path.name for path in directory.iterdir())
    pickled = [name for name in there if name.endswith(PICKLE_SUFFIXES)]
    if pickled:
        raise CheckpointError(
            f"{directory} has its weights pickled, in {pickled[0]}: to read such a file is to run what is in it, which "
            "we never do. Where you trust it, transformers writes safetensors: "
            f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(...)"
        )
    raise CheckpointError(
        f"{directory} has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}, but {', '.join(there[:8]) or 'nothing at all'}"
    )


def _open_shards(directory: Path) -> dict[str, LazyTensor]:
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError(f"{index} is damaged: a weight_map from tensors to files was expected")
    found: dict[str, LazyTensor] = {}
    for shard in sorted(set(listed.values())):
        if shard != Path(shard).name or "\\" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {shard!r}: shards are safetensors files in the directory itself")
        if not os.path.isfile(directory / shard):
            raise CheckpointError(f"{index} names {shard!r}, and there is no such file in {directory}")
        held = open_safetensors(directory / shard)
        promised = {name for name, file in listed.items() if file == shard}
        if wrong := sorted(promised ^ held.keys()):
            where = "in the index but not in the file" if wrong[0] in promised else "in the file but not in the index"
            raise CheckpointError(f"{directory / shard} and {index} disagree: {wrong[0]} is {where}")
        found |= held
    return found
