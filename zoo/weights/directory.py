"""A directory as model hubs have them: config.json, and tensors in one safetensors file or in shards with an index."""

import json
import os
import re
from pathlib import Path
from typing import Any

from zoo.models.config import nearest
from zoo.models.facts import Family
from zoo.models.families import FAMILIES, families

from .tensors import CheckpointError, Tensor, read_file, unique

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def find(directory: str | Path) -> Path:
    """The directory itself. **Raises** `CheckpointError` where there is none; of a name on a hub it says how it is
    downloaded."""
    path = Path(directory)
    if os.path.isdir(path):  # unlike Path's own, False too where a name is too long for the file system
        return path
    if os.path.exists(path):
        raise CheckpointError(f"{path} is a file: pass the directory that holds it and {CONFIG}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(directory)):
        raise CheckpointError(
            f"there is no directory {directory}. If that is a name on the Hugging Face hub: `pip install "
            f"huggingface_hub`, then `hf download {directory} --local-dir {path.name}`, and load {path.name!r}"
        )
    raise CheckpointError(f"there is no directory {directory}")


def read_json(path: Path) -> dict[str, Any]:
    """**Raises** `CheckpointError` for a file that is missing, damaged, or no table."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: a table of keys and values was expected")
    return found


def family_of(config: dict[str, Any], path: Path) -> Family:
    """**Raises** `CheckpointError` for a `model_type` that we do not have, with the nearest that we do."""
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    told = f"has the model_type {name!r}" if name is not None else "has no model_type"
    hint = nearest(str(name), FAMILIES) or "."
    raise CheckpointError(f"{path} {told}{hint} Families that can be read: {', '.join(families())}")


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by name; nothing is read but headers.

    **Raises** `CheckpointError` where there is no safetensors file, where one is damaged, and where an index leaves the
    directory or does not agree with its shards.
    """
    if os.path.isfile(directory / WHOLE):
        return read_file(directory / WHOLE)
    if os.path.isfile(directory / INDEX):
        return read_shards(directory)
    there = sorted(path.name for path in directory.iterdir())
    pickled = [name for name in there if name.endswith(PICKLED)]
    if pickled:
        raise CheckpointError(
            f"{directory} has its weights pickled, in {pickled[0]}: to read such a file is to run what is in it, which "
            "we never do. Where you trust it, transformers writes safetensors: "
            f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(...)"
        )
    raise CheckpointError(
        f"{directory} has neither {WHOLE} nor {INDEX}, but {', '.join(there[:8]) or 'nothing at all'}"
    )


def read_shards(directory: Path) -> dict[str, Tensor]:
    index = directory / INDEX
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError(f"{index} is damaged: a weight_map from tensors to files was expected")
    found: dict[str, Tensor] = {}
    for shard in sorted(set(listed.values())):
        if shard != Path(shard).name or "\\" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {shard!r}: shards are safetensors files in the directory itself")
        if not os.path.isfile(directory / shard):
            raise CheckpointError(f"{index} names {shard!r}, and there is no such file in {directory}")
        held = read_file(directory / shard)
        promised = {name for name, file in listed.items() if file == shard}
        if wrong := sorted(promised ^ held.keys()):
            where = "in the index but not in the file" if wrong[0] in promised else "in the file but not in the index"
            raise CheckpointError(f"{directory / shard} and {index} disagree: {wrong[0]} is {where}")
        found |= held
    return found
