"""From a model to a directory that transformers and `load` read: the family's table, backward."""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from zoo.models.hf.config import ConfigError, read_config, suggest_nearest
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.spec import Family, NameMap, Origin
from zoo.models.parameter_paths import find_differences

from .directory import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from .plan import plan, strip_base_prefix
from .safetensors import CheckpointError, write_safetensors

_WEIGHT_FILE_PATTERN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def save(
    model: PyTree,
    directory: str | Path,
    family: str | Family | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model as a Hugging Face directory: `config.json`, and its parameters under the names of its family.

    - `model`: a model, or a tree of its shape: gradients are written under the names of their parameters.
    - `family`: what to write it as. A loaded model is written as what it was read from; one made from scratch as the
      first family that computes the same.
    - `config`: keys to add or change in config.json that say nothing of the computation: `{"eos_token_id": 2}`.
    - `shard_bytes`: a larger checkpoint is written in shards with an index.

    What the config describes is built once more, in shapes only, and compared with the model: it is written only if it
    will be read as what it is. A checkpoint in MXFP4 that was decoded as it was read is written as the numbers that it
    stands for, which is another file; one that was loaded `packed` as the same bytes. Tensors are written one by one;
    what the directory held before is replaced only when all of them are there. Of several processes, which all call
    this, the first writes. Numbers that are not finite are written as they are, and refused by `load`.

    **Raises** `CheckpointError` where no family computes what the model does, with the first thing in which it differs,
    and where parts that are stored in one tensor have several dtypes.
    """
    origin, table = resolve_origin(model, family, dict(config or {}))
    _write_checkpoint(model, Path(directory), origin, table, shard_bytes)


def resolve_origin(model: Any, asked: str | Family | None, more: dict[str, Any]) -> tuple[Origin, NameMap]:
    """The config that a model is written with, and the names of its tensors."""
    family = _get_family(asked) if isinstance(asked, str) else asked
    origin, reasons = getattr(model, "origin", None), []
    if origin is not None and family in (None, origin.family):
        config = {**json.loads(origin.config), **more}
        reason = _find_config_mismatch(model, origin.family, config)
        if reason is None:
            return Origin(origin.family, _format_config(config, model), origin.lacks_base_prefix), read_name_map(
                origin.family, config, origin.lacks_base_prefix
            )
        family = origin.family  # it was changed since: what it is now may still be of the family
        reasons.append(f"it was read as {family.name}, and {reason}")
    for candidate in FAMILIES.values() if family is None else [family]:
        if candidate.describe is None:
            reasons.append(f"{candidate.name}: only models that were read from such a checkpoint can be written as one")
            continue
        try:
            config = {**_describe_config(model, candidate), **more}
            reason = _find_config_mismatch(model, candidate, config)
        except ConfigError as error:
            reason = str(error)
        if reason is None:
            return Origin(candidate, _format_config(config, model)), read_name_map(candidate, config, False)
        reasons.append(f"{candidate.name}: {reason}")
    raise CheckpointError("no checkpoint could be read as this model:\n  " + "\n  ".join(reasons))


def _get_family(name: str) -> Family:
    if name not in FAMILIES:
        raise CheckpointError(f"there is no family {name!r}{suggest_nearest(name, FAMILIES)}")
    return FAMILIES[name]


def _describe_config(model: Any, family: Family) -> dict[str, Any]:
    """What a family's config.json says of a model made from scratch."""
    assert family.describe is not None
    theirs = {usual: word for word, usual in family.aliases.items()}
    found = {key: value for key, value in family.describe(model).items() if key in family.defaults}
    facts = {"architectures": [family.architecture], "model_type": family.name}
    return {**facts, **{theirs.get(key, key): value for key, value in found.items()}}


def _find_config_mismatch(model: Any, family: Family, config: Mapping[str, Any]) -> str | None:
    """The first thing in which a model differs from the one that a config describes; None where nothing does."""
    try:
        read = read_config(family, config)
        built = eqx.filter_eval_shape(lambda: family.build(read, key=jax.random.key(0)))
    except ValueError as error:
        return str(error)
    return next(find_differences(model, built), None)


def read_name_map(family: Family, config: Mapping[str, Any], lacks_base_prefix: bool) -> NameMap:
    table = family.names(read_config(family, config))
    return strip_base_prefix(table) if lacks_base_prefix else table


def _format_config(config: Mapping[str, Any], model: Any) -> str:
    """config.json with the dtype that the parameters have, in the spelling that it had."""
    kinds = {np.dtype(x.dtype) for x in jax.tree.leaves(model) if hasattr(x, "dtype")}
    dtypes = {kind for kind in kinds if jax.numpy.issubdtype(kind, jax.numpy.floating)}
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    found = dict(config)
    if len(dtypes) == 1:
        found[key] = next(iter(dtypes)).name
    return json.dumps(found, indent=2, sort_keys=True) + "\n"


def _write_checkpoint(model: Any, directory: Path, origin: Origin, name_map: NameMap, shard_bytes: int) -> None:
    shapes, tensor = export_tensors(model, name_map)
    shards = _assign_shards(shapes, shard_bytes)
    numbered = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    files = [SAFE_WEIGHTS_NAME] if len(shards) == 1 else numbered
    texts = {CONFIG_NAME: origin.config}
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(map(_count_bytes, shapes.values()))}, "weight_map": weight_map}
        texts[SAFE_WEIGHTS_INDEX_NAME] = json.dumps(index, indent=2, sort_keys=True) + "\n"
    if jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            for file, names in zip(files, shards, strict=True):
                write_safetensors(directory / f"{file}.partial", {name: shapes[name] for name in names}, tensor)
            for file, text in texts.items():
                (directory / f"{file}.partial").write_text(text, encoding="utf-8")
        except BaseException:
            for file in (*files, *texts):
                (directory / f"{file}.partial").unlink(missing_ok=True)
            raise
        for file in (*files, *texts):
            os.replace(directory / f"{file}.partial", directory / file)
        for old in directory.iterdir():  # what would be read before, or beside, what was just written
            if _WEIGHT_FILE_PATTERN.fullmatch(old.name) and old.name not in (*files, *texts):
                old.unlink()
    else:
        for name in shapes:  # its shards are needed by the process that writes
            tensor(name)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("zoo.save")  # nobody reads before it is all there


_TensorSpecs = dict[str, tuple[tuple[int, ...], np.dtype]]


def export_tensors(model: PyTree, name_map: NameMap) -> tuple[_TensorSpecs, Callable[[str], np.ndarray]]:
    """What a model's tensors are called and shaped in a checkpoint, in order of their names; and a function that puts
    together the one of a name."""
    leaves, planned = jax.tree.leaves(model), plan(model, name_map)
    shapes: _TensorSpecs = {}
    for name, of in sorted(planned.items()):
        dtypes = {np.dtype(leaves[piece.leaf].dtype) for piece in of.slices}
        if len(dtypes) > 1:
            told = " and ".join(sorted(map(str, dtypes)))
            raise CheckpointError(f"{name} is made of {', '.join(of.mapping.parts)}, which are {told}: cast them alike")
        shapes[name] = of.shape, dtypes.pop()

    def tensor(name: str) -> np.ndarray:
        of = planned[name]
        parts = [gather_to_host(leaves[piece.leaf], piece.index) for piece in of.slices]
        if len(parts) == 1 and not of.mapping.transposed:
            return parts[0].reshape(of.shape)
        whole = np.empty(of.shape, parts[0].dtype)
        for view, part in zip(of.mapping.views(whole, of.part_shapes, of.num_stacked_dims), parts, strict=True):
            view[...] = part.reshape(view.shape)
        return whole

    return shapes, tensor


def _count_bytes(spec: tuple[tuple[int, ...], np.dtype]) -> int:
    shape, dtype = spec
    return math.prod(shape) * dtype.itemsize


def _assign_shards(shapes: _TensorSpecs, max_bytes: int) -> list[list[str]]:
    """Names in order, as many in each shard as fit; one that fits in none is alone."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, kind in shapes.items():
        size = _count_bytes(kind)
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def gather_to_host(array: Any, index: tuple[int, ...]) -> np.ndarray:
    """`array[index]`, put together from wherever its shards are."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array[index], tiled=True))
    if index or not isinstance(array, jax.Array):
        return np.asarray(array[index])
    whole = np.empty(array.shape, array.dtype)  # by shards: JAX would keep a copy of the whole on the host
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            whole[shard.index] = shard.data
    return whole
