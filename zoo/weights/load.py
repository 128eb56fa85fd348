"""From a directory to a model: shapes from the config, then every array, shard by shard, from the bytes it needs."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zoo.models import Decoder
from zoo.models.facts import Family
from zoo.models.names import each
from zoo.ops.mxfp4 import NOT_A_NUMBER
from zoo.parallel import Mesh
from zoo.parallel import leaves as annotated
from zoo.parallel.place import tell

from .checkpoint import Checkpoint, opened
from .packed import SCALES
from .plan import Planned
from .tensors import CheckpointError, Tensor, empty


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
    honoured, tensors that are missing, too many, or of another shape or kind; and, while reading, for numbers that are
    not finite.
    """
    return filled(opened(directory, family, ignore, packed), mesh, dtype)


def filled(checkpoint: Checkpoint, mesh: Mesh | None, dtype: Any) -> Decoder:
    """The model of a checkpoint, its numbers read."""
    planned, source, place = checkpoint.planned, checkpoint.tensors, checkpoint.place
    if checkpoint.tied is not None:
        head, embedding = checkpoint.tied
        if not same(source[head], source[embedding]):
            raise CheckpointError(f"{place}: {head} is not {embedding}, and the config says that they are tied")
    leaves, treedef = jax.tree.flatten(checkpoint.model)
    homes: list[dict[tuple[int, ...], tuple[str, int]]] = [{} for _ in leaves]
    for name, tensor in planned.items():
        for part, piece in enumerate(tensor.pieces):
            homes[piece.leaf][piece.index] = name, part
    learnt = [leaf.learnt for leaf in annotated(checkpoint.model)]
    dtypes = [
        dtype_of(home, source, place, dtype, own) if floating(x.dtype) else dtype_of_codes(home, source, place, x.dtype)
        for home, own, x in zip(homes, learnt, leaves, strict=True)
    ]
    shapes = [jax.ShapeDtypeStruct(x.shape, of) for x, of in zip(leaves, dtypes, strict=True)]
    alone = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract, on_mesh = jax.tree.unflatten(treedef, shapes), None
    if mesh is not None:
        on_mesh = jax.tree.leaves(mesh.shardings(abstract))
        tell(abstract, mesh)
    arrays = []
    for home, leaf, sharding in zip(homes, shapes, on_mesh or [alone] * len(shapes), strict=True):
        shard = sharer(home, leaf, planned, source, place)
        arrays.append(jax.make_array_from_callback(leaf.shape, sharding, shard))
        for name, _ in home.values():
            source[name].forget()
    return jax.tree.unflatten(treedef, arrays)


def same(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and np.array_equal(one.read(), other.read())


def dtype_of(
    home: Mapping[tuple[int, ...], tuple[str, int]], source: Mapping[str, Tensor], place: str, dtype: Any, learnt: bool
) -> np.dtype:
    """What an array is to be: as asked, and no narrower than in the file where it is not learnt.

    **Raises** `CheckpointError` for tensors of another kind than floating point, and where layers that are stacked in
    one array have several dtypes and none was asked for.
    """
    held = {source[name].dtype: name for name, _ in home.values()}
    for found, name in held.items():
        if np.dtype(found).itemsize == 1 or not floating(found):
            raise CheckpointError(
                f"{place}: {name} is stored as {found}, where float64, float32, bfloat16 or float16 was expected; "
                "quantised checkpoints are not read"
            )
    if dtype is None and len(held) > 1:
        (one, first), (other, second) = list(held.items())[:2]
        raise CheckpointError(
            f"{place}: {first} is {one} and {second} is {other}: pass dtype= to read all layers in one"
        )
    wanted = np.dtype(next(iter(held)) if dtype is None else dtype)
    wanted = wanted if learnt else max([wanted, *held], key=lambda kind: np.dtype(kind).itemsize)
    if not floating(wanted):
        raise CheckpointError(f"dtype={wanted}: parameters are floating point, say float32, bfloat16 or float16")
    return np.dtype(jax.dtypes.canonicalize_dtype(wanted))


def dtype_of_codes(
    home: Mapping[tuple[int, ...], tuple[str, int]], source: Mapping[str, Tensor], place: str, dtype: np.dtype
) -> np.dtype:
    """Of an array that holds packed numbers, whatever the dtype of the others. **Raises** `CheckpointError` for tensors
    of another."""
    for name, _ in home.values():
        if source[name].dtype != dtype:
            raise CheckpointError(f"{place}: {name} is stored as {source[name].dtype}, where {dtype} was expected")
    return np.dtype(dtype)


def floating(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.numpy.floating)


def sharer(
    home: Mapping[tuple[int, ...], tuple[str, int]],
    leaf: jax.ShapeDtypeStruct,
    planned: Mapping[str, Planned],
    source: Mapping[str, Tensor],
    place: str,
) -> Callable[[tuple[slice, ...] | None], np.ndarray]:
    """A function from a shard's slices to its numbers. Devices that hold the same share the same buffer."""
    stars = len(next(iter(home)))
    made: dict[str, np.ndarray] = {}

    def piece(index: tuple[int, ...]) -> tuple[str, Any]:
        name, part = home[index]
        tensor = planned[name]
        return name, source[name].part(tensor.row, tensor.parts, tensor.lead, part)

    def as_it_is() -> np.ndarray | None:
        """The tensor itself, where it may be kept and is what the array should be."""
        name, numbers = piece(next(iter(home)))
        return numbers if not stars and source[name].shared and numbers.dtype == leaf.dtype else None

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        slices = tuple(slice(*s.indices(size)) for s, size in zip(index or (), leaf.shape, strict=True))
        if str(slices) not in made:
            chosen = tuple(range(size)[s] for size, s in zip(leaf.shape, slices, strict=True))
            kept = as_it_is() if tuple(map(len, chosen)) == leaf.shape else None
            buffer = empty(map(len, chosen), leaf.dtype) if kept is None else kept
            for here, numbers in each(chosen[:stars]):
                name, numbers_of_piece = piece(numbers)
                put(buffer, here, numbers_of_piece[slices[stars:]], f"{place}: {name}", copy=kept is None)
            made[str(slices)] = buffer
        return made[str(slices)]

    return shard


def put(buffer: np.ndarray, index: tuple[int, ...], numbers: np.ndarray, name: str, *, copy: bool) -> None:
    """**Raises** `CheckpointError` for numbers that are not finite, or that the dtype does not hold."""
    if copy:
        with np.errstate(over="ignore"):
            buffer[index] = numbers
    if buffer.dtype == np.uint8 and name.endswith(SCALES) and (numbers == NOT_A_NUMBER).any():
        raise CheckpointError(f"{name} has the scale {NOT_A_NUMBER}, which says that a block is not a number")
    if not np.isfinite(buffer[index]).all():
        if np.isfinite(numbers).all():
            raise CheckpointError(f"{name} has numbers up to {np.abs(numbers).max():.3g}: too large for {buffer.dtype}")
        where = np.argwhere(~np.isfinite(numbers))[0].tolist()
        raise CheckpointError(f"{name} has a number that is not finite (of the part read, at {where})")
