"""Load a checkpoint directory: shapes from the config, then each array shard by shard, from only the bytes it needs."""

import dataclasses
import functools
import logging
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key

from zoo._checks import parse_dtype
from zoo._keywords import check_keywords
from zoo.models.hf.predictors import build_model
from zoo.models.hf.spec import Family
from zoo.models.hf.wrappers import TIE
from zoo.models.parameter_paths import iterate_indices, list_parameter_paths
from zoo.ops.quantized.mxfp4 import NAN_SCALE
from zoo.parallel import Mesh
from zoo.parallel import leaves as annotated_leaves
from zoo.parallel.mesh import require_mesh
from zoo.parallel.place import deal_out, warn_replicated

from .directory import resolve_directory
from .packed import SCALES_SUFFIX
from .plan import drop_tensors, plan_tensors
from .resolve import Checkpoint, LoadedModel, open_checkpoint
from .safetensors import CheckpointError, LazyTensor

_logger = logging.getLogger("zoo")
_ALIGNMENT = 64  # bytes; JAX takes a CPU buffer without a copy if its address is a multiple of this
_Sources = Mapping[tuple[int, ...], tuple[str, int]]
"""Index into the stacked dims of an array -> (name of the tensor that holds this slice, part of the tensor)."""


@check_keywords
def load(
    directory: str | Path,
    *,
    revision: str | None = None,
    mesh: Mesh | None = None,
    dtype: Any = None,
    family: Family | None = None,
    ignore: Collection[str] = (),
    packed: bool = False,
    images: bool = True,
) -> LoadedModel:
    """Load the model in a Hugging Face directory, or of a name on the hub: `config.json`, and safetensors in one file
    or in shards.

        model = zoo.load("Qwen/Qwen3-0.6B")

    - `directory`: a path, or `organization/model`, which is downloaded into the hub's cache (the extra `hub`). A
      directory of that name wins. `revision`, or `@revision` behind the name, is a branch, a tag or a commit.
    - `mesh`: shard the model over this mesh, its layers in the rounds of the layout; each device reads its own shards
      only. Default: one device.
    - `dtype`: dtype of all parameters. Default: as stored. Buffers (a router's selection bias) are not rounded to it.
    - `family`: a family of your own. Default: the one that the config's `model_type` names.
    - `ignore`: config keys to disregard; `save` omits them too.
    - `packed`: keep the matrices of a quantized checkpoint as they are stored, frozen, and dequantize them tile by tile
      inside the matmul (`GroupQuantizedLinear`, `NVFP4Linear`, `NestedNF4Linear`, `MXFP4Linear`); `save` writes them
      back byte for byte. FP8, GPTQ, AWQ, compressed-tensors, bitsandbytes and MXFP4. Default: dequantize them in
      float32 and round to `dtype`, by default the dtype of the other tensors. The model is then like any other: `save`
      writes plain tensors and a config without quantization. Activations are not quantized. Formats:
      `zoo.weights.formats`.
    - `images`: False to read only the language model of a model that reads images.

    A decoder that `architectures` names `XForSequenceClassification` is read as a `zoo.models.SequenceScore`.

    A multimodal directory is read whole where it has a family (`zoo.models.ImageText`: LLaVA, Gemma 3 and others), and
    as its language model with `images=False`, or without a family (Llama 4, Kimi K2.5). Tensors that the model does not
    use are left aside, with one line in the log; `save(source=)` writes them back. Modules of multi-token prediction
    are `model.predictors` where the family's page says so, and left aside elsewhere.

    Tensors are read one at a time, straight into the arrays: peak memory is the model and about one tensor. The model
    remembers its family and config, for `save`. The config's dropout is not carried over: a recipe turns it on.

    **Raises** `CheckpointError`, before anything is allocated, for a missing directory, or a name that cannot be
    downloaded; weights that are pickled, damaged, or not packed despite `packed`; an unknown family or quantization; a
    config key that would change the result and is not supported; missing or unexpected tensors, or a wrong shape or
    dtype; and, while reading, for numbers that are not finite. **Raises** `TypeError` for an unknown `dtype`,
    `ValueError` for one that is not floating point.
    """
    if dtype is not None:
        dtype = parse_dtype(dtype)
    if mesh is not None:
        require_mesh(mesh)
    path = resolve_directory(directory, revision)
    return read_parameters(open_checkpoint(path, family, ignore, packed, images), mesh, dtype)


def read_parameters(checkpoint: Checkpoint, mesh: Mesh | None, dtype: Any) -> LoadedModel:
    """Read a resolved checkpoint's parameters into its model, on one device or sharded over `mesh`. One line in the log
    names the tensors that are left aside."""
    if checkpoint.model.origin.left_aside:
        _logger.warning(
            "%s: left aside, since the model does not use them: %s; zoo.save(..., source=) writes them back",
            *(checkpoint.location, checkpoint.model.origin.left_aside),
        )
    tensor_plans = checkpoint.tensor_plans
    tensors = checkpoint.tensors
    location = checkpoint.location
    if checkpoint.tied:
        head, embedding = checkpoint.tied
        if not _is_equal_tensor(tensors[head], tensors[embedding]):
            always_ties = checkpoint.family.required_values.get(TIE) == (True,)
            advice = "" if always_ties else f": set {TIE} to false in config.json to read both"
            raise CheckpointError(
                f"{location}: {head} is not {embedding}, and the config says that they are tied{advice}"
            )
    for copy, name in checkpoint.head_copies.items():
        if not _is_equal_tensor(tensors[copy], tensors[name]):
            raise CheckpointError(f"{location}: {copy} is not {name}, and a predictor has no matrix of its own for it")
    for copy, name in checkpoint.copies.items():
        if not _is_equal_tensor(tensors[copy], tensors[name]):
            raise CheckpointError(f"{location}: {copy} is not {name}, and the model has one module for both")
    model = checkpoint.model
    dealt = model if mesh is None else deal_out(model, mesh)
    if jax.tree.structure(dealt) != jax.tree.structure(model):  # the layers have another leading dim now
        model = dealt
        tensor_plans = drop_tensors(plan_tensors(model, checkpoint.name_map), model.origin.lacking)
        checkpoint = dataclasses.replace(checkpoint, model=model, tensor_plans=tensor_plans)
    leaves, treedef = jax.tree.flatten(model)
    sources: list[dict[tuple[int, ...], tuple[str, int]]] = [{} for _ in leaves]
    for name, tensor_plan in tensor_plans.items():
        for part, piece in enumerate(tensor_plan.slices):
            sources[piece.leaf][piece.index] = name, part
    is_trainable = [leaf.trainable for leaf in annotated_leaves(model)]
    dtypes = []
    for leaf_sources, trainable, x in zip(sources, is_trainable, leaves, strict=True):
        if not leaf_sources:
            dtypes.append(x.dtype)
        elif _is_floating(x.dtype):
            dtypes.append(_resolve_dtype(leaf_sources, tensors, location, dtype, trainable))
        else:
            dtypes.append(_resolve_code_dtype(leaf_sources, tensors, location, x.dtype))
    shapes = [jax.ShapeDtypeStruct(x.shape, leaf_dtype) for x, leaf_dtype in zip(leaves, dtypes, strict=True)]
    abstract_model = jax.tree.unflatten(treedef, shapes)
    if mesh is None:
        shardings = [jax.sharding.SingleDeviceSharding(jax.local_devices()[0])] * len(shapes)
    else:
        shardings = jax.tree.leaves(mesh.shardings(abstract_model))
        warn_replicated(abstract_model, mesh)
    arrays = []
    built = _build_lacking(checkpoint, [number for number, names in enumerate(sources) if not names])
    for number, (leaf_sources, shape, sharding) in enumerate(zip(sources, shapes, shardings, strict=True)):
        if leaf_sources:
            read_shard = _make_shard_reader(leaf_sources, shape, checkpoint)
        else:
            read_shard = built[number].__getitem__
        arrays.append(jax.make_array_from_callback(shape.shape, sharding, read_shard))
        for name, _ in leaf_sources.values():
            tensors[name].release()
    return jax.tree.unflatten(treedef, arrays)


def _build_lacking(checkpoint: Checkpoint, numbers: Sequence[int]) -> dict[int, np.ndarray]:
    """Return the arrays that no tensor holds, by their number in the model, as the family builds them. All others are
    dead code of the compiled program."""
    if not numbers:
        return {}
    paths = list_parameter_paths(checkpoint.model)
    leaves = jax.tree.leaves(checkpoint.model)

    @jax.jit
    def build(key: Key[Array, ""]) -> list[Array]:
        model = build_model(checkpoint.family, checkpoint.config, key=key)
        names = [path[:2] for path in list_parameter_paths(model)]
        found = dict(zip(names, jax.tree.leaves(model), strict=True))
        return [found[paths[number][:2]].reshape(leaves[number].shape) for number in numbers]

    return dict(zip(numbers, map(np.asarray, build(jax.random.key(0))), strict=True))


def _is_equal_tensor(first: LazyTensor, second: LazyTensor) -> bool:
    """Return True for equal numbers, which may be stored in two dtypes."""
    if first.shape != second.shape:
        return False
    if first.dtype == second.dtype:
        return np.array_equal(first.read(), second.read())
    widest = np.float64 if np.float64 in (first.dtype, second.dtype) else np.float32
    rows = zip(first.read(), second.read(), strict=True)  # one by one, so that no copy of the whole is made
    return all(np.array_equal(ours.astype(widest), theirs.astype(widest)) for ours, theirs in rows)


def _resolve_dtype(
    sources: _Sources, tensors: Mapping[str, LazyTensor], location: str, dtype: Any, is_trainable: bool
) -> np.dtype:
    """Return an array's dtype: as requested, or as stored. A buffer is never narrower than in the file.

    **Raises** `CheckpointError` for tensors that are not floating point, and if layers that are stacked in one array
    are stored in several dtypes and no dtype was requested.
    """
    stored = {tensors[name].dtype: name for name, _ in sources.values()}
    if any(tensors[name].keeps_dtype for name, _ in sources.values()):
        dtype = None
    for stored_dtype, name in stored.items():
        if np.dtype(stored_dtype).itemsize == 1 or not _is_floating(stored_dtype):
            raise CheckpointError(
                f"{location}: {name} is stored as {stored_dtype}, where float64, float32, bfloat16 or float16 was "
                "expected; matrices are dequantized only as a quantization_config in config.json says"
            )
    if dtype is None and len(stored) > 1:
        (first_dtype, first), (second_dtype, second) = list(stored.items())[:2]
        raise CheckpointError(
            f"{location}: {first} is {first_dtype} and {second} is {second_dtype}: pass dtype= to read all layers in "
            "one dtype"
        )
    if dtype is None:
        dtype = next(iter(stored))
    result = np.dtype(dtype)
    if not is_trainable:
        result = max([result, *stored], key=lambda kind: np.dtype(kind).itemsize)
    return np.dtype(jax.dtypes.canonicalize_dtype(result))


def _resolve_code_dtype(
    sources: _Sources, tensors: Mapping[str, LazyTensor], location: str, dtype: np.dtype
) -> np.dtype:
    """Return the dtype of packed codes, which `load(dtype=)` does not change. **Raises** `CheckpointError` for tensors
    stored in another."""
    for name, _ in sources.values():
        if tensors[name].dtype != dtype:
            raise CheckpointError(f"{location}: {name} is stored as {tensors[name].dtype}: expected {dtype}")
    return np.dtype(dtype)


def _is_floating(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.numpy.floating)


def _make_shard_reader(
    sources: _Sources, leaf: jax.ShapeDtypeStruct, checkpoint: Checkpoint
) -> Callable[[tuple[slice, ...] | None], np.ndarray]:
    """Return a function that reads one shard of an array, given its slices. Replicas share one buffer."""
    num_stacked_dims = len(next(iter(sources)))
    tensors = checkpoint.tensors
    location = checkpoint.location
    buffers: dict[str, np.ndarray] = {}

    def view_part(index: tuple[int, ...]) -> tuple[str, Any]:
        name, part = sources[index]
        plan = checkpoint.tensor_plans[name]
        return name, tensors[name].read_part(plan.mapping, plan.part_shapes, plan.num_stacked_dims, part)

    def view_whole_tensor() -> np.ndarray | None:
        """Return the tensor itself if it may be used without a copy."""
        name, numbers = view_part(next(iter(sources)))
        if not num_stacked_dims and tensors[name].zero_copy and numbers.dtype == leaf.dtype:
            return numbers
        return None

    def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
        slices = tuple(slice(*s.indices(size)) for s, size in zip(index or (), leaf.shape, strict=True))
        if str(slices) not in buffers:
            ranges = tuple(range(size)[s] for size, s in zip(leaf.shape, slices, strict=True))
            is_whole = tuple(map(len, ranges)) == leaf.shape
            uncopied = view_whole_tensor() if is_whole else None
            buffer = _empty_aligned(map(len, ranges), leaf.dtype) if uncopied is None else uncopied
            for buffer_index, source_index in iterate_indices(ranges[:num_stacked_dims]):
                name, part = view_part(source_index)
                read = functools.partial(operator.getitem, part, slices[num_stacked_dims:])
                _write_checked(buffer, buffer_index, read, f"{location}: {name}", copy=uncopied is None)
            buffers[str(slices)] = buffer
        return buffers[str(slices)]

    return read_shard


def _empty_aligned(shape: Iterable[int], dtype: Any) -> np.ndarray:
    """Return an uninitialized array that JAX takes on the CPU without a copy."""
    shape = tuple(shape)
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _write_checked(
    buffer: np.ndarray, index: tuple[int, ...], read: Callable[[], np.ndarray], name: str, *, copy: bool
) -> None:
    """Write the numbers that `read` returns to `buffer[index]`. `read` is called in here, so no caller holds the
    numbers of one matrix while the next is decoded.

    **Raises** `CheckpointError` if they are not finite or overflow.
    """
    numbers = np.asarray(read())  # indexing a scalar does not give an array
    if copy:
        with np.errstate(over="ignore"):
            buffer[index] = numbers
    if buffer.dtype == np.uint8 and name.endswith(SCALES_SUFFIX) and (numbers == NAN_SCALE).any():
        raise CheckpointError(f"{name} has the scale {NAN_SCALE}, which marks a block as not a number")
    if not np.isfinite(buffer[index]).all():
        if np.isfinite(numbers).all():
            raise CheckpointError(f"{name} has numbers up to {np.abs(numbers).max():.3g}: too large for {buffer.dtype}")
        where = np.argwhere(~np.isfinite(numbers))[0].tolist()
        raise CheckpointError(f"{name} has a number that is not finite (of the part read, at {where})")
