"""What a checkpoint holds, or a preset would, from headers and shapes alone."""

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

from zoo.models import Decoder, Stack, count_active_parameters, preset, swap_stack
from zoo.models.hf.config import read_config
from zoo.models.hf.spec import Config, Family, NameMap
from zoo.models.parameter_paths import ParameterPath, list_parameter_paths
from zoo.models.stack import is_stack
from zoo.parallel import Mesh
from zoo.weights.plan import find_mapping, invert_name_map
from zoo.weights.resolve import open_checkpoint, resolve_directory
from zoo.weights.safetensors import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, LazyTensor, open_tensors, read_json


@dataclasses.dataclass(frozen=True)
class ParameterSummary:
    """One of our parameters, in all the layers where it has this shape."""

    name: str
    """With stars for numbers: `layers.*.attention.query.weight`."""
    part: str
    """What it belongs to: `attention`, `norms`, `head`."""
    layers: tuple[int, ...]
    dims: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """As stored, or as they are made."""
    tensors: tuple[str, ...]
    """What the checkpoint calls it."""
    spec: PartitionSpec | None
    bytes_per_device: int
    trainable: bool = True

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class _StoredFiles:
    """What there is of a model on disk."""

    files: int
    bytes: int
    tensors: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """A checkpoint or a preset, told."""

    family: str
    architecture: str
    tied: bool
    active: int
    """How many of the parameters a token meets: fewer than all where there are experts."""
    stored: _StoredFiles | None
    """None for a preset."""
    dtypes: dict[str, int]
    """How many numbers are stored, or made, in each."""
    segments: list[list[int]]
    """The cut of the layers: how many in a pattern, how often it repeats."""
    cache: dict[str, Any] | None
    """Bytes for each token, for a row however long, and in all for the longest text that the config speaks of. None
    without a cache."""
    mesh: Mesh | None
    rows: tuple[ParameterSummary, ...]

    @property
    def count(self) -> int:
        """What is learnt, as `zoo.count` has it."""
        return sum(row.count for row in self.rows if row.trainable)

    @property
    def bytes(self) -> int:
        """Of all parameters, in memory."""
        return sum(count * np.dtype(dtype).itemsize for dtype, count in self.dtypes.items())

    @property
    def bytes_per_device(self) -> int:
        return sum(row.bytes_per_device for row in self.rows)


def summarize(directory: Path, mesh: Mesh | None = None) -> Summary:
    """What the checkpoint holds, and how it would lie on `mesh`. Nothing but headers is read.

    **Raises** `CheckpointError` for what `zoo.load` would refuse before it reads a tensor; `ValueError` for a mesh that
    does not divide the model.
    """
    path = resolve_directory(directory)
    checkpoint = open_checkpoint(path)
    dtypes: list[dict[np.dtype, None]] = [{} for _ in jax.tree.leaves(checkpoint.model)]
    for name, tensor in checkpoint.tensor_plans.items():
        for piece in tensor.slices:
            dtypes[piece.leaf][checkpoint.tensors[name].dtype] = None
    files, tensors = list_weight_files(path), open_tensors(path)
    stored = _StoredFiles(len(files), sum(file.stat().st_size for file in files), len(tensors))
    found = _summarize_shapes(
        checkpoint.family, checkpoint.config, checkpoint.model, checkpoint.name_map, [*map(list, dtypes)], mesh
    )
    return dataclasses.replace(found, stored=stored, dtypes=_count_by_dtype(tensors.values()))


def summarize_preset(name: str, mesh: Mesh | None = None) -> Summary:
    """What a preset would be, and how it would lie on `mesh`. Nothing is made but shapes.

    **Raises** `ValueError` for a name that is no preset's, and for a mesh that does not divide the model.
    """
    model = eqx.filter_eval_shape(lambda: preset(name, key=jax.random.key(0)))
    family = model.origin.family
    config = read_config(family, json.loads(model.origin.config))
    dtypes = [[np.dtype(x.dtype)] for x in jax.tree.leaves(model)]
    return _summarize_shapes(family, config, model, family.names(config), dtypes, mesh)


def _summarize_shapes(
    family: Family,
    config: Config,
    model: Any,
    table: NameMap,
    dtypes: Sequence[Sequence[np.dtype]],
    mesh: Mesh | None,
) -> Summary:
    """Of a model in shapes, where each array has, or is to have, these `dtypes`."""
    return Summary(
        family=family.name,
        architecture=family.architecture,
        tied=getattr(model, "head", model) is None,
        active=count_active_parameters(model),
        stored=None,
        dtypes=_count_by_dtype(jax.tree.leaves(model)),
        segments=[
            [len(segment.blocks), segment.local_repeats] for stack in _find_stacks(model) for segment in stack.segments
        ],
        cache=_measure_cache(model, [held[0] for held in dtypes], config.get("max_position_embeddings")),
        mesh=mesh,
        rows=tuple(_summarize_parameters(model, table, [tuple(map(str, held)) for held in dtypes], mesh)),
    )


def list_weight_files(directory: Path) -> list[Path]:
    """The files that hold a checkpoint's tensors."""
    if (directory / SAFE_WEIGHTS_NAME).exists():
        return [directory / SAFE_WEIGHTS_NAME]
    return [
        directory / name for name in sorted(set(read_json(directory / SAFE_WEIGHTS_INDEX_NAME)["weight_map"].values()))
    ]


def _count_by_dtype(tensors: Iterable[LazyTensor | jax.ShapeDtypeStruct]) -> dict[str, int]:
    """How many numbers there are of each dtype, most first."""
    found: dict[str, int] = {}
    for tensor in tensors:
        found[str(tensor.dtype)] = found.get(str(tensor.dtype), 0) + math.prod(tensor.shape)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _find_stacks(model: Any) -> list[Stack]:
    return [x for x in jax.tree.leaves(model, is_leaf=is_stack) if isinstance(x, Stack)]


def _summarize_parameters(
    model: Any, table: NameMap, dtypes: Sequence[tuple[str, ...]], mesh: Mesh | None
) -> list[ParameterSummary]:
    """A row for each of our names and shapes: arrays that differ only in the layers they hold are one."""
    ours, groups = invert_name_map(table), {}
    for place, x, held in zip(list_parameter_paths(model), jax.tree.leaves(model), dtypes, strict=True):
        layered = place.name.startswith("layers.*.")
        key = place.name, tuple(x.shape[layered:])
        groups.setdefault(key, []).append((place, x.shape, held))
    rows = []
    for (name, shape), arrays in groups.items():
        place, _, _ = arrays[0]
        layers = [n for place, _, _ in arrays for n in place.ranges[0]] if name.startswith("layers.*.") else []
        held = tuple(dict.fromkeys(dtype for _, _, own in arrays for dtype in own))
        width = np.dtype(held[0]).itemsize
        specs = [None if mesh is None else mesh.spec(place.dims, own, place.name) for place, own, _ in arrays]
        lying = [math.prod(own) // _count_shards(spec, mesh) for (_, own, _), spec in zip(arrays, specs, strict=True)]
        rows.append(
            ParameterSummary(
                name=name,
                part=_get_part_name(name),
                layers=tuple(sorted(layers)),
                dims=" ".join(dim.name for dim in place.dims),
                shape=(len(layers), *shape) if layers else shape,
                dtypes=held,
                tensors=(_format_tensor_name(place, ours),),
                spec=specs[0],
                bytes_per_device=sum(lying) * width,
                trainable=place.leaf.trainable,
            )
        )
    parts = list(dict.fromkeys(row.part for row in rows))
    last = {"norms": len(parts), "head": len(parts) + 1}
    return sorted(rows, key=lambda row: -1 if "embedding" in row.part else last.get(row.part, parts.index(row.part)))


def _count_shards(spec: PartitionSpec | None, mesh: Mesh | None) -> int:
    """Into how many shares an array is cut."""
    if spec is None or mesh is None:
        return 1
    axes = [axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())]
    return math.prod(mesh.shape[axis] for axis in axes)


def _get_part_name(name: str) -> str:
    """The part of a model that a parameter belongs to: the first word of its name below the layers."""
    word = name.removeprefix("layers.*.").partition(".")[0]
    return "norms" if word == "norm" or word.endswith("_norm") else word


def _format_tensor_name(path: ParameterPath, ours: Mapping[str, Any]) -> str:
    """The name of their tensor, and which part of it where there are several."""
    name, row, number = find_mapping(path, ours)
    told = [f"part {number + 1} of {len(row.parts)}"] if len(row.parts) > 1 else []
    matrix = len(path.dims) - path.name.count("*") == 2  # the row speaks of vectors too, and they are as they are
    told += ["transposed"] if row.transposed and matrix else []
    return name + (f" ({', '.join(told)})" if told else "")


def _measure_cache(model: Any, dtypes: Sequence[np.dtype], max_length: int | None) -> dict[str, Any] | None:
    """What a model remembers of a row, in bytes: for each token, however many there are, and of `longest` tokens."""
    if not isinstance(model, Decoder) or not isinstance(model.stack, Stack):
        return None
    leaves, treedef = jax.tree.flatten(model)
    retyped = [jax.ShapeDtypeStruct(x.shape, dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
    model = jax.tree.unflatten(treedef, retyped)
    repeats = [segment.local_repeats for segment in model.stack.segments for _ in segment.blocks]
    # layers of a kind have states of one shape: one repeat of each pattern tells of all
    first = swap_stack(
        model, lambda stack: jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), stack)
    )

    def taken(length: int) -> tuple[int, str]:
        states = eqx.filter_eval_shape(first.init_state, 1, length)
        sizes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) for state in states]
        return sum(map(math.prod, zip(sizes, repeats, strict=True))), str(jax.tree.leaves(states)[0].dtype)

    try:
        (one, dtype), (two, _) = taken(1), taken(2)
    except NotImplementedError:
        return None
    return {
        "bytes_per_token": two - one,
        "bytes_per_row": 2 * one - two,
        "dtype": dtype,
        "length": max_length,
        "bytes": None if max_length is None else taken(max_length)[0],
    }
