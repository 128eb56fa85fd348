"""Batches: the dims of their arrays, the rows that each process reads, and the global arrays made from these rows."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from zoo._checks import (
    BATCH_KEYS,
    PLACE_KEYS,
    SOURCE_KEYS,
    check_batch_ids,
    check_batch_types,
    check_numpy_values,
    is_host_readable,
)

from .mesh import Mesh, require_mesh
from .module import Leaf, leaves, map_leaves
from .place import copy_buffer, refuse_imagined


def name_batch_dims(name: str) -> tuple[str, ...]:
    """Return the leading dims of a batch array that is in no module, by its path in the tree.

    They are `batch seq` for the arrays of a token batch (`tokens`, `targets`, `weights`, `segment_ids`, `positions`,
    `reference`, of an encoder-decoder `source` and `source_mask`, and of texts with images `spans`, `lookahead` and
    `coordinates`) and for an array without a name: an argument by itself or an element of a tuple. Any other name has
    only rows.
    """
    names = {part for part in name.split(".") if part and not part.isdigit()}
    if not names or names.intersection((*BATCH_KEYS, *SOURCE_KEYS, *PLACE_KEYS, "spans")):
        return ("batch", "seq")
    return ("batch",)


def find_batch_axis(leaf: Leaf, x: Any) -> int | None:
    """Return the array axis of the rows; None for an array without rows, such as a parameter or a scalar."""
    if leaf.dims is None:
        return 0 if np.ndim(x) else None
    return next((axis for axis, dim in enumerate(leaf.dims) if dim.name == "batch"), None)


def place_batch(batch: PyTree, mesh: Mesh, *, vocab: int | None = None) -> PyTree:
    """Shard a batch over the mesh: its rows over the axes of `batch`, its tokens over the axes of `seq`.

    - `tokens`, `targets`, `weights`, `segment_ids`, `positions` and `reference` of a mapping are `batch seq`, and so is
      an array without a name: `batch` itself or an element of a tuple.
    - An array of any other name has only rows: `images` are never sharded along a second dim.
    - A `zoo.parallel.Module` declares its own dims: `logits: Float[Array, "batch seq vocab"]`.

    The same dims hold wherever a batch is passed, in `zoo.value_and_grad` and `zoo.spmd`.

    With several processes each passes the rows that `zoo.parallel.reader(mesh)` assigns to it, over the full sequence;
    the result is the global array. Processes that share an index pass the same rows, which is checked for the first
    batch on a mesh. A `jax.ShapeDtypeStruct` has the shape of the global array, and gets its sharding.

    - `vocab`: size of the vocabulary. If given, `tokens` and `targets` of the batch are checked against it, on the
      host: inside a program an id outside the vocabulary can only give a loss of NaN.

    **Raises** `ValueError` if the mesh does not divide the number of rows or tokens, if processes that share rows pass
    different ones, and for tokens outside of `vocab` or targets beyond it; the loss ignores negative targets. For NumPy
    arrays also for integers that do not fit into 32 bits, and for `segment_ids` in which an id comes again after
    another. **Raises** `TypeError` for a list under one of these names.
    """
    require_mesh(mesh)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch)):
        shardings = mesh.shardings(batch, name_batch_dims)
        return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), batch, shardings)
    refuse_imagined(mesh)
    check_batch_types(batch)
    for leaf, x in zip(leaves(batch), jax.tree.leaves(batch), strict=True):
        check_numpy_values(x, leaf.name)
    if vocab is not None:
        check_batch_ids(batch, vocab)
    if jax.process_count() == 1:
        return jax.device_put(jax.tree.map(copy_buffer, batch), mesh.shardings(batch, name_batch_dims))
    _, parts = reader(mesh)
    rows = _assign_rows(mesh)
    if not rows.is_checked:
        _check_shared_rows(batch, mesh, rows.readers)
        rows.is_checked = True
    return _make_global_batch(batch, mesh, sorted(rows.shards[jax.process_index()]), parts)


def fetch_arrays(tree: PyTree) -> PyTree:
    """Return arrays on the host, whole in each of several processes: the way back from `place_batch`."""
    return jax.tree.map(_fetch_array, tree)


def _fetch_array(x: Any) -> np.ndarray:
    if is_host_readable(x):
        return np.asarray(jax.device_get(x))
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def reader(mesh: Mesh) -> tuple[int, int]:
    """Return (index, count): this process reads part `index` of `count` of the rows of each batch.

        batches = ShuffledBatches(rows, batch_size, process=zoo.parallel.reader(mesh))

    Processes whose devices hold the same rows, as where `tensor`, `context` or `pipe` spans them, have the same index
    and read the same rows. It is (0, 1) for one process.

    **Raises** `ValueError` if two processes hold some rows in common, but not all, and for a process without devices in
    the mesh.
    """
    readers = _assign_rows(mesh).readers
    if jax.process_index() not in readers:
        raise ValueError(f"process {jax.process_index()} has no device in the mesh {mesh}, so it reads no rows")
    return readers[jax.process_index()]


@dataclasses.dataclass
class _RowAssignment:
    """The rows of each process on one mesh."""

    shards: Mapping[int, frozenset[int]]
    """Shards of the rows that each process holds."""
    readers: Mapping[int, tuple[int, int]]
    """(index, count) of each process."""
    is_checked: bool = False
    """Whether a batch has been compared between the processes that share rows. One comparison waits for all processes
    and for the steps that they have dispatched, so later batches are not compared."""


@functools.cache
def _assign_rows(mesh: Mesh) -> _RowAssignment:
    shards = _find_row_shards(mesh, lambda device: device.process_index)
    return _RowAssignment(shards, _group_processes(shards, mesh))


def _find_row_shards(mesh: Mesh, get_process: Callable[[Any], int]) -> dict[int, frozenset[int]]:
    """Return the shards of the rows that the devices of each process hold, by the index map of the sharding."""
    sharding = NamedSharding(mesh.devices, PartitionSpec(mesh.axes("batch")))
    held: dict[int, set[int]] = {}
    for device, (rows,) in sharding.devices_indices_map((mesh.count_shards("batch"),)).items():
        held.setdefault(get_process(device), set()).add(rows.start or 0)
    return {process: frozenset(shards) for process, shards in held.items()}


def _group_processes(held: Mapping[int, frozenset[int]], mesh: Mesh) -> dict[int, tuple[int, int]]:
    """Return (index, count) of each process. Processes that hold the same shards of the rows have the same index."""
    groups = sorted(set(held.values()), key=min)
    if len({len(shards) for shards in groups}) > 1 or sum(map(len, groups)) > len(frozenset().union(*groups)):
        parts = ", ".join(f"process {process} {sorted(shards)}" for process, shards in sorted(held.items()))
        raise ValueError(
            f"processes have to hold either the same shards of the rows or different ones, and equally many. On {mesh} "
            f"they hold: {parts}. Let the axes inside a process multiply to its number of devices."
        )
    return {process: (groups.index(shards), len(groups)) for process, shards in held.items()}


def _check_shared_rows(batch: PyTree, mesh: Mesh, readers: Mapping[int, tuple[int, int]]) -> None:
    """**Raises** `ValueError`, in every process, if processes that share rows pass different ones, as when they read by
    process number instead of by `reader`."""
    is_shared = len({index for index, _ in readers.values()}) < len(readers)
    if not is_shared or len(readers) < jax.process_count():
        return
    digest = 0
    for x in jax.tree.leaves(batch):
        digest = zlib.crc32(np.ascontiguousarray(x).tobytes(), digest)
    digests = multihost_utils.process_allgather(np.uint32(digest))
    first: dict[int, int] = {}
    for process, (index, count) in sorted(readers.items()):
        other = first.setdefault(index, process)
        if digests[other] != digests[process]:
            raise ValueError(
                f"processes {other} and {process} hold the same rows on {mesh}, and pass different ones: read part "
                f"{index} of {count} in both, batches(..., process=zoo.parallel.reader(mesh))"
            )


def _make_global_batch(batch: PyTree, mesh: Mesh, shards: list[int], parts: int) -> PyTree:
    """Make global arrays from the rows of this process, which holds these `shards` of them, one of `parts`."""

    def make_shape(leaf, x):
        shape = list(np.shape(x))
        axis = find_batch_axis(leaf, x)
        if axis is not None:
            shape[axis] *= parts
        return jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.canonicalize_dtype(x.dtype))

    def make_global_array(leaf, x, abstract, sharding):
        x, axis = np.asarray(x, abstract.dtype), find_batch_axis(leaf, x)

        def read_shard(index):
            if axis is None:
                return x[index].copy()
            rows = x.shape[axis] // len(shards)
            first = shards.index((index[axis].start or 0) // rows) * rows
            return x[(*index[:axis], slice(first, first + rows), *index[axis + 1 :])].copy()

        return jax.make_array_from_callback(abstract.shape, sharding, read_shard)

    shapes = map_leaves(make_shape, batch)
    return map_leaves(make_global_array, batch, shapes, mesh.shardings(shapes, name_batch_dims))
