"""Summarize a checkpoint or a preset from headers and shapes: parameters, dtypes, sharding, KV cache."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from zoo.inspect import implementations
from zoo.inspect.implementations import ModelImplementations
from zoo.inspect.parameters import ModelSummary, count_by_dtype, find_max_length, summarize_model
from zoo.models import Decoder, ImageText, preset
from zoo.models.hf.config import read_config
from zoo.models.hf.spec import Config, Family, NameMap
from zoo.models.parameter_paths import ParameterPath
from zoo.ops.platform import Platform
from zoo.parallel import Mesh
from zoo.weights.directory import resolve_directory
from zoo.weights.plan import find_mapping, invert_name_map
from zoo.weights.resolve import open_checkpoint
from zoo.weights.safetensors import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, open_tensors, read_json
from zoo.weights.shapes import list_stored_dtypes, set_dtypes


@dataclasses.dataclass(frozen=True)
class _StoredFiles:
    """Size of a checkpoint on disk."""

    files: int
    bytes: int
    tensors: int
    left_aside: str
    """The tensors that the model does not use, in words; "" without any."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """Summary of a checkpoint or a preset."""

    family: str
    architecture: str
    model: ModelSummary
    stored: _StoredFiles | None
    """None for a preset."""
    implementations: ModelImplementations | None = None
    """Implementations that the layers get on a platform; None without a platform, and for a model without a loss."""


def summarize(directory: Path, mesh: Mesh | None = None, platform: Platform | None = None) -> Summary:
    """Summarize a checkpoint, its sharding over `mesh` and its implementations on `platform`. Reads headers only.

    **Raises** `CheckpointError` as `zoo.load` before it reads a tensor; `ValueError` for a mesh that does not divide
    the model.
    """
    path = resolve_directory(directory)
    checkpoint = open_checkpoint(path)
    dtypes = list_stored_dtypes(checkpoint)
    files = list_weight_files(path)
    tensors = open_tensors(path)
    stored = _StoredFiles(
        files=len(files),
        bytes=sum(file.stat().st_size for file in files),
        tensors=len(tensors),
        left_aside=checkpoint.model.origin.left_aside,
    )
    summary = _summarize_shapes(
        checkpoint.family, checkpoint.config, checkpoint.model, checkpoint.name_map, dtypes, mesh, platform
    )
    model = dataclasses.replace(summary.model, dtypes=count_by_dtype(tensors.values()))
    return dataclasses.replace(summary, stored=stored, model=model)


def summarize_preset(name: str, mesh: Mesh | None = None, platform: Platform | None = None) -> Summary:
    """Summarize a preset, its sharding over `mesh` and its implementations on `platform`, from shapes only.

    **Raises** `ValueError` for an unknown preset, and for a mesh that does not divide the model.
    """
    model = eqx.filter_eval_shape(lambda: preset(name, key=jax.random.key(0)))
    family = model.origin.family
    config = read_config(family, json.loads(model.origin.config))
    dtypes = [[np.dtype(x.dtype)] for x in jax.tree.leaves(model)]
    return _summarize_shapes(family, config, model, family.names(config), dtypes, mesh, platform)


def _summarize_shapes(
    family: Family,
    config: Config,
    model: Any,
    name_map: NameMap,
    dtypes: Sequence[Sequence[np.dtype]],
    mesh: Mesh | None,
    platform: Platform | None,
) -> Summary:
    """Summarize a model in shapes. `dtypes` are the dtypes of each array, as stored or as initialized."""
    stored_model = set_dtypes(model, [array_dtypes[0] for array_dtypes in dtypes])
    mappings = invert_name_map(name_map)
    chosen = None if platform is None else _list_implementations(stored_model, platform)
    return Summary(
        family=family.name,
        architecture=family.architecture,
        model=summarize_model(
            model,
            [tuple(map(str, array_dtypes)) for array_dtypes in dtypes],
            mesh,
            cached_model=stored_model,
            max_length=find_max_length(config),
            name_tensor=partial(_format_tensor_name, mappings=mappings),
        ),
        stored=None,
        implementations=chosen,
    )


def list_weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: one file, or the shards of its index."""
    if (directory / SAFE_WEIGHTS_NAME).exists():
        return [directory / SAFE_WEIGHTS_NAME]
    return [
        directory / name for name in sorted(set(read_json(directory / SAFE_WEIGHTS_INDEX_NAME)["weight_map"].values()))
    ]


def _format_tensor_name(path: ParameterPath, mappings: Mapping[str, Any]) -> str:
    """Return the name of a parameter's tensor in the checkpoint, its part of a fused tensor, and `transposed`."""
    name, mapping, number = find_mapping(path, mappings)
    if len(mapping.parts) > 1:
        notes = [f"part {number + 1} of {len(mapping.parts)}"]
    else:
        notes = []
    is_matrix = len(path.dims) - path.name.count("*") == 2  # the mapping also covers biases, which are not transposed
    if mapping.transposed and is_matrix:
        notes.append("transposed")
    if not notes:
        return name
    return f"{name} ({', '.join(notes)})"


def _list_implementations(model: Any, platform: Platform) -> ModelImplementations | None:
    """Return the implementations of a training step of 1,024 tokens, or of as many as the model, or the decoder of an
    `ImageText`, has positions for."""
    if isinstance(model, ImageText):
        model = model.decoder
    if not isinstance(model, Decoder):
        return None
    positions = model.position_embedding
    seq_len = 1024
    if positions is not None:
        seq_len = int(min(seq_len, positions.length))
    return implementations(model, seq_len=seq_len, platform=platform)
