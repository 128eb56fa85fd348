"""From a directory to a model: shapes from the config, then every array, shard by shard, from the bytes it needs."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zoo.models import Decoder
from zoo.models.hf.spec import Family
from zoo.models.parameter_paths import iterate_indices
from zoo.ops.quantized.mxfp4 import NAN_SCALE
from zoo.parallel import Mesh
from zoo.parallel import leaves as annotated
from zoo.parallel.place import warn_replicated

from .packed import SCALES_SUFFIX
from .plan import TensorPlan
from .resolve import Checkpoint, open_checkpoint
from .safetensors import CheckpointError, LazyTensor, empty_aligned


def load(
    directory: str | Path,
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
    family: Family | None = None,
    ignore: Collection[str] = (),
    packed: bool = False,
) -> Decoder:
    """The model in a Hugging Face directory: `config.json`, and safetensors in one file or in shards.

    - `mesh`: where it is to lie; every device reads its own share and no more. One device unless given.
    - `dtype`: of all parameters; the file's own unless given. What is no parameter (a router's selection bias) is not
      rounded to it.
    - `family`: a family of your own; the one that the config's `model_type` names unless given.
    - `ignore`: keys of the config to leave out of account; `save` leaves them out too.
    - `packed`: of a checkpoint with matrices in MXFP4, keep them so (`zoo.layers.PackedLinear`): a quarter of the
      memory of bfloat16, no gradient into them, and `save` writes them byte for byte as they were. Unless asked for
      they are decoded, each number to exactly what it stands for, and the model is like any other: `save` writes plain
      tensors and a config that says nothing of packing, and `load` reads the same numbers from these.

    Tensors are read one by one, straight into place: beside the model there is never more than about one of them in
    memory. The model remembers its family and config, for `save`. Nothing is dropped in training unless a recipe says
    so: the config's dropout is not carried over.

    **Raises** `CheckpointError`, before anything is allocated, for a directory that is none, weights that are pickled
    or damaged, or not packed though `packed` says so, an unknown family, a key that would change the result and is not
    honored, tensors that are missing, too many, or of another shape or kind; and, while reading, for numbers that are
    not finite.
    """
    return read_parameters(open_checkpoint(directory, family, ignore, packed), mesh, dtype)


def read_parameters(checkpoint: Checkpoint, mesh: Mesh | None, dtype: Any) -> Decoder:
    """The model of a checkpoint, its numbers read."""
    planned, source, place = checkpoint.tensor_plans, checkpoint.tensors, checkpoint.location
    if checkpoint.tied is not None:
        head, embedding = checkpoint.tied
        if not _is_equal_tensor(source[head], source[embedding]):
            raise CheckpointError(f"{place}: {head} is not {embedding}, and the config says that they are tied")
    leaves, treedef = jax.tree.flatten(checkpoint.model)
    homes: list[dict[tuple[int, ...], tuple[str, int]]] = [{} for _ in leaves]
    for name, tensor in planned.items():
        for part, piece in enumerate(tensor.slices):
            homes[piece.leaf][piece.index] = name, part
    learnt = [leaf.trainable for leaf in annotated(checkpoint.model)]
    dtypes = [
        _resolve_dtype(home, source, place, dtype, own)
        if _is_floating(x.dtype)
        else _resolve_code_dtype(home, source, place, x.dtype)
        for home, own, x in zip(homes, learnt, leaves, strict=True)
    ]
    shapes = [jax.ShapeDtypeStruct(x.shape, of) for x, of in zip(leaves, dtypes, strict=True)]
    alone = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract, on_mesh = jax.tree.unflatten(treedef, shapes), None
    if mesh is not None:
        on_mesh = jax.tree.leaves(mesh.shardings(abstract))
        warn_replicated(abstract, mesh)
    arrays = []
    for home, leaf, sharding in zip(homes, shapes, on_mesh or [alone] * len(shapes), strict=True):
        shard = _make_shard_reader(home, leaf, planned, source, place)
        arrays.append(jax.make_array_from_callback(leaf.shape, sharding, shard))
        for name, _ in home.values():
            source[name].release()
    return jax.tree.unflatten(treedef, arrays)


def _is_equal_tensor(first: LazyTensor, second: LazyTensor) -> bool:
    return (first.dtype, first.shape) == (second.dtype, second.shape) and np.array_equal(first.read(), second.read())


def _resolve_dtype(
    sources: Mapping[tuple[int, ...], tuple[str, int]],
    tensors: Mapping[str, LazyTensor],
    location: str,
    dtype: Any,
    is_trainable: bool,
) -> np.dtype:
    """What an array is to be: as asked, and no narrower than in the file where it is not learnt.

    **Raises** `CheckpointError` for tensors of another kind than floating point, and where layers that are stacked in
    one array have several dtypes and none was asked for.
    """
    held = {tensors[name].dtype: name for name, _ in sources.values()}
    for found, name in held.items():
        if np.dtype(found).itemsize == 1 or not _is_floating(found):
            raise CheckpointError(
                f"{location}: {name} is stored as {found}, where float64, float32, bfloat16 or float16 was expected; "
                "quantized checkpoints are not read"
            )
    if dtype is None and len(held) > 1:
        (one, first), (other, second) = list(held.items())[:2]
        raise CheckpointError(
            f"{location}: {first} is {one} and {second} is {other}: pass dtype= to read all layers in one"
        )
    wanted = np.dtype(next(iter(held)) if dtype is None else dtype)
    wanted = wanted if is_trainable else max([wanted, *held], key=lambda kind: np.dtype(kind).itemsize)
    if not _is_floating(wanted):
        raise CheckpointError(f"dtype={wanted}: parameters are floating point, say float32, bfloat16 or float16")
    return np.dtype(jax.dtypes.canonicalize_dtype(wanted))


def _resolve_code_dtype(
    sources: Mapping[tuple[int, ...], tuple[str, int]],
    tensors: Mapping[str, LazyTensor],
    location: str,
    dtype: np.dtype,
) -> np.dtype:
    """Of an array that holds packed numbers, whatever the dtype of the others. **Raises** `CheckpointError` for tensors
    of another."""
    for name, _ in sources.values():
        if tensors[name].dtype != dtype:
            raise CheckpointError(f"{location}: {name} is stored as {tensors[name].dtype}, where {dtype} was expected")
    return np.dtype(dtype)


def _is_floating(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.numpy.floating)


def _make_shard_reader(
    sources: Mapping[tuple[int, ...], tuple[str, int]],
    leaf: jax.ShapeDtypeStruct,
    tensor_plans: Mapping[str, TensorPlan],
    tensors: Mapping[str, LazyTensor],
    location: str,
) -> Callable[[tuple[slice, ...] | None], np.ndarray]:
    """A function from a shard's slices to its numbers. Devices that hold the same share the same buffer."""
    stars = len(next(iter(sources)))
    made: dict[str, np.ndarray] = {}

    def piece(index: tuple[int, ...]) -> tuple[str, Any]:
        name, part = sources[index]
        tensor = tensor_plans[name]
        return name, tensors[name].read_part(tensor.mapping, tensor.part_shapes, tensor.num_stacked_dims, part)

    def as_it_is() -> np.ndarray | None:
        """The tensor itself, where it may be kept and is what the array should be."""
        name, numbers = piece(next(iter(sources)))
        return numbers if not stars and tensors[name].zero_copy and numbers.dtype == leaf.dtype else None

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        slices = tuple(slice(*s.indices(size)) for s, size in zip(index or (), leaf.shape, strict=True))
        if str(slices) not in made:
            chosen = tuple(range(size)[s] for size, s in zip(leaf.shape, slices, strict=True))
            kept = as_it_is() if tuple(map(len, chosen)) == leaf.shape else None
            buffer = empty_aligned(map(len, chosen), leaf.dtype) if kept is None else kept
            for here, numbers in iterate_indices(chosen[:stars]):
                name, numbers_of_piece = piece(numbers)
                _write_checked(buffer, here, numbers_of_piece[slices[stars:]], f"{location}: {name}", copy=kept is None)
            made[str(slices)] = buffer
        return made[str(slices)]

    return shard


def _write_checked(buffer: np.ndarray, index: tuple[int, ...], numbers: np.ndarray, name: str, *, copy: bool) -> None:
    """**Raises** `CheckpointError` for numbers that are not finite, or that the dtype does not hold."""
    if copy:
        with np.errstate(over="ignore"):
            buffer[index] = numbers
    if buffer.dtype == np.uint8 and name.endswith(SCALES_SUFFIX) and (numbers == NAN_SCALE).any():
        raise CheckpointError(f"{name} has the scale {NAN_SCALE}, which says that a block is not a number")
    if not np.isfinite(buffer[index]).all():
        if np.isfinite(numbers).all():
            raise CheckpointError(f"{name} has numbers up to {np.abs(numbers).max():.3g}: too large for {buffer.dtype}")
        where = np.argwhere(~np.isfinite(numbers))[0].tolist()
        raise CheckpointError(f"{name} has a number that is not finite (of the part read, at {where})")
