"""Summarize a checkpoint or a preset from headers and shapes: parameters, dtypes, sharding, KV cache."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import PartitionSpec

from zoo.inspect import ModelImplementations, implementations
from zoo.models import Decoder, Stack, count_active_parameters, preset, swap_stack
from zoo.models.hf.config import read_config
from zoo.models.hf.spec import Config, Family, NameMap
from zoo.models.parameter_paths import ParameterPath, list_parameter_paths
from zoo.models.stack import is_stack
from zoo.ops.platform import Platform
from zoo.parallel import Mesh
from zoo.weights.directory import resolve_directory
from zoo.weights.plan import find_mapping, invert_name_map
from zoo.weights.resolve import open_checkpoint
from zoo.weights.safetensors import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, LazyTensor, open_tensors, read_json
from zoo.weights.shapes import list_stored_dtypes, set_dtypes


@dataclasses.dataclass(frozen=True)
class ParameterSummary:
    """A parameter, in all layers where it has the same shape."""

    name: str
    """Name with * for layer and expert numbers: `layers.*.attention.query.weight`."""
    part: str
    """Part of the model: `attention`, `norms`, `head`."""
    layers: tuple[int, ...]
    dims: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Dtypes as stored, or as initialized."""
    tensors: tuple[str, ...]
    """Names in the checkpoint."""
    spec: PartitionSpec | None
    bytes_per_device: int
    trainable: bool = True

    @property
    def count(self) -> int:
        return math.prod(self.shape)


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
    tied: bool
    active: int
    """Active parameters per token: fewer than all in a mixture of experts."""
    stored: _StoredFiles | None
    """None for a preset."""
    dtypes: dict[str, int]
    """Number of elements of each dtype, most first."""
    segments: list[list[int]]
    """Layers per pattern and repeats of the pattern, for each scanned segment."""
    cache: dict[str, Any] | None
    """Bytes of the KV cache or recurrent state per token and per row, and for the config's maximum length. None for a
    model without either."""
    mesh: Mesh | None
    rows: tuple[ParameterSummary, ...]
    implementations: ModelImplementations | None = None
    """Implementations that the layers get on a platform; None without a platform, and for a model without a loss."""

    @property
    def count(self) -> int:
        """Number of trainable parameters, as `zoo.count`."""
        return sum(row.count for row in self.rows if row.trainable)

    @property
    def bytes(self) -> int:
        """Memory of all parameters."""
        return sum(count * np.dtype(dtype).itemsize for dtype, count in self.dtypes.items())

    @property
    def bytes_per_device(self) -> int:
        return sum(row.bytes_per_device for row in self.rows)


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
    size = sum(file.stat().st_size for file in files)
    left_aside = checkpoint.model.origin.left_aside
    stored = _StoredFiles(len(files), size, len(tensors), left_aside)
    summary = _summarize_shapes(
        *(checkpoint.family, checkpoint.config, checkpoint.model, checkpoint.name_map, dtypes),
        *(mesh, platform),
    )
    return dataclasses.replace(summary, stored=stored, dtypes=_count_by_dtype(tensors.values()))


def make_preset_shapes(name: str) -> Any:
    """Return a preset in shapes. **Raises** `ValueError` for an unknown one."""
    return eqx.filter_eval_shape(lambda: preset(name, key=jax.random.key(0)))


def summarize_preset(name: str, mesh: Mesh | None = None, platform: Platform | None = None) -> Summary:
    """Summarize a preset, its sharding over `mesh` and its implementations on `platform`, from shapes only.

    **Raises** `ValueError` for an unknown preset, and for a mesh that does not divide the model.
    """
    model = make_preset_shapes(name)
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
    return Summary(
        family=family.name,
        architecture=family.architecture,
        tied=isinstance(model, Decoder) and model.head is None,
        active=count_active_parameters(model),
        stored=None,
        dtypes=_count_by_dtype(jax.tree.leaves(model)),
        segments=[
            [len(segment.blocks), segment.local_repeats] for stack in _find_stacks(model) for segment in stack.segments
        ],
        cache=_measure_cache(stored_model, config.get("max_position_embeddings")),
        implementations=None if platform is None else _list_implementations(stored_model, platform),
        mesh=mesh,
        rows=tuple(
            _summarize_parameters(model, name_map, [tuple(map(str, array_dtypes)) for array_dtypes in dtypes], mesh)
        ),
    )


def list_weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: one file, or the shards of its index."""
    if (directory / SAFE_WEIGHTS_NAME).exists():
        return [directory / SAFE_WEIGHTS_NAME]
    return [
        directory / name for name in sorted(set(read_json(directory / SAFE_WEIGHTS_INDEX_NAME)["weight_map"].values()))
    ]


def _count_by_dtype(tensors: Iterable[LazyTensor | jax.ShapeDtypeStruct]) -> dict[str, int]:
    """Count the elements of each dtype, most first."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[str(tensor.dtype)] = counts.get(str(tensor.dtype), 0) + math.prod(tensor.shape)
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _find_stacks(model: Any) -> list[Stack]:
    return [x for x in jax.tree.leaves(model, is_leaf=is_stack) if isinstance(x, Stack)]


def _summarize_parameters(
    model: Any, name_map: NameMap, dtypes: Sequence[tuple[str, ...]], mesh: Mesh | None
) -> list[ParameterSummary]:
    """Return a row per parameter name and shape: arrays of the same parameter in different layers share a row."""
    mappings = invert_name_map(name_map)
    groups = {}
    for path, x, array_dtypes in zip(list_parameter_paths(model), jax.tree.leaves(model), dtypes, strict=True):
        has_layers = path.name.startswith("layers.*.")
        key = path.name, tuple(x.shape[has_layers:])
        groups.setdefault(key, []).append((path, x.shape, array_dtypes))
    rows = []
    for (name, shape), arrays in groups.items():
        path, _, _ = arrays[0]
        if name.startswith("layers.*."):
            layers = [number for path, _, _ in arrays for number in path.ranges[0]]
        else:
            layers = []
        row_dtypes = tuple(dict.fromkeys(dtype for _, _, array_dtypes in arrays for dtype in array_dtypes))
        specs = [None if mesh is None else mesh.spec(path.dims, full, path.name) for path, full, _ in arrays]
        largest = max(range(len(arrays)), key=lambda i: math.prod(arrays[i][1]))  # its segment has the dim `layers`
        sizes = [math.prod(full) // _count_shards(spec, mesh) for (_, full, _), spec in zip(arrays, specs, strict=True)]
        rows.append(
            ParameterSummary(
                name=name,
                part=_get_part_name(name),
                layers=tuple(sorted(layers)),
                dims=" ".join(dim.name for dim in arrays[largest][0].dims),
                shape=(len(layers), *shape) if layers else shape,
                dtypes=row_dtypes,
                tensors=(_format_tensor_name(path, mappings),),
                spec=specs[largest],
                bytes_per_device=sum(sizes) * np.dtype(row_dtypes[0]).itemsize,
                trainable=path.leaf.trainable,
            )
        )
    parts = list(dict.fromkeys(row.part for row in rows))
    last = {"norms": len(parts), "head": len(parts) + 1}
    return sorted(rows, key=lambda row: -1 if "embedding" in row.part else last.get(row.part, parts.index(row.part)))


def _count_shards(spec: PartitionSpec | None, mesh: Mesh | None) -> int:
    """Return the number of shards of an array."""
    if spec is None or mesh is None:
        return 1
    axes = [axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())]
    return math.prod(mesh.shape[axis] for axis in axes)


def _get_part_name(name: str) -> str:
    """Return the part of the model that a parameter belongs to: the first word of its name within the layer."""
    word = name.removeprefix("layers.*.").partition(".")[0]
    return "norms" if word == "norm" or word.endswith("_norm") else word


def _format_tensor_name(path: ParameterPath, mappings: Mapping[str, Any]) -> str:
    """Return the name of a parameter's tensor in the checkpoint, its part of a fused tensor, and `transposed`."""
    name, mapping, number = find_mapping(path, mappings)
    if len(mapping.parts) > 1:
        notes = [f"part {number + 1} of {len(mapping.parts)}"]
    else:
        notes = []
    is_matrix = len(path.dims) - path.name.count("*") == 2  # the mapping also covers biases, which are not transposed
    notes += ["transposed"] if mapping.transposed and is_matrix else []
    return name + (f" ({', '.join(notes)})" if notes else "")


def _list_implementations(model: Any, platform: Platform) -> ModelImplementations | None:
    """Return the implementations of a training step of 1,024 tokens, or of as many as the model has positions for."""
    if not isinstance(model, Decoder):
        return None
    positions = model.position_embedding
    seq_len = 1024 if positions is None else min(1024, positions.length)
    return implementations(model, seq_len=seq_len, platform=platform)


def _measure_cache(model: Any, max_length: int | None) -> dict[str, Any] | None:
    """Return the bytes of the KV cache or recurrent state: per token, per row, and of `max_length` tokens."""
    if not isinstance(model, Decoder) or not isinstance(model.stack, Stack):
        return None
    repeats = [segment.local_repeats for segment in model.stack.segments for _ in segment.blocks]
    # all repeats of a pattern have states of the same shape: one suffices
    first = swap_stack(
        model, lambda stack: jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), stack)
    )

    def measure(length: int) -> tuple[int, str]:
        states = eqx.filter_eval_shape(first.init_state, 1, length)
        sizes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) for state in states]
        return sum(map(math.prod, zip(sizes, repeats, strict=True))), str(jax.tree.leaves(states)[0].dtype)

    try:
        (one_token, dtype), (two_tokens, _) = measure(1), measure(2)
    except NotImplementedError:
        return None
    return {
        "bytes_per_token": two_tokens - one_token,
        "bytes_per_row": 2 * one_token - two_tokens,
        "dtype": dtype,
        "length": max_length,
        "bytes": None if max_length is None else measure(max_length)[0],
    }
