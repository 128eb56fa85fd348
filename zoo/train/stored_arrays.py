"""Arrays of every row of a dataset that a frozen model computes once, kept on the disk next to the tokens.

data = store_arrays(data, compute, mesh, identity=(fingerprint(model), "top 64"), batch_size=8, folder=folder)
for batch in data.train.batches(batch_size=8): ...              # with the arrays that `compute` returned
"""

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Shaped

from zoo._checks import BATCH_KEYS
from zoo._terminal import show
from zoo.parallel import Mesh, place_batch, reader
from zoo.text.batches import Dataset, OrderedBatches
from zoo.text.mixture import Mixture
from zoo.text.records import Records
from zoo.text.records.source import digest_values
from zoo.text.token_cache import open_cache, verify_cache

from .interrupt import is_set_on_any_process
from .processes import run_on_first
from .progress import Throughput, format_metrics

_Arrays = Mapping[str, Shaped[np.ndarray, "rows ..."]]
_LINE_SECONDS = 30


class RowsWithArrays:
    """Rows of a dataset with further arrays, one element of each for every row: a `Dataset`."""

    def __init__(self, rows: Dataset, arrays: _Arrays):
        """**Raises** `ValueError` for arrays of another number of rows."""
        for name, array in arrays.items():
            if len(array) != len(rows):
                raise ValueError(f"{name} has {len(array):,} rows for {len(rows):,} rows: one for each was expected")
        self._rows = rows
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Shaped[np.ndarray, "..."]]:
        return self._rows[index] | {name: np.asarray(array[index]) for name, array in self._arrays.items()}


def store_arrays(
    data: Records,
    compute: Callable[[Mapping[str, Array]], Mapping[str, Array]],
    mesh: Mesh,
    *,
    identity: Any,
    batch_size: int,
    folder: Path,
) -> Records:
    """Add arrays to each row of the training split. They are computed in one pass over the rows, unless they are there.

    - `compute`: from a placed batch to arrays "batch ...", by name. It runs in every process.
    - `identity`: what the arrays depend on besides the rows, of values that JSON can write: a digest of the model,
      options. Another identity, or other rows, are stored in another subfolder of `folder`.
    - `batch_size`: rows at a time, over all processes.

    The first process writes, batch by batch, and all processes read: they share `folder`. Arrays that are damaged are
    computed again. A pass that ends early leaves none.

    **Raises** `OSError` if a process does not see the folder.
    """

    def add(rows: Dataset, digest: str) -> RowsWithArrays:
        directory = folder / digest_values(identity, digest, "train")
        if is_set_on_any_process(not _is_whole(directory)):
            run_on_first(lambda: shutil.rmtree(directory, ignore_errors=True))
            _write(directory, len(rows), _compute_batches(rows, compute, mesh, batch_size))
        paths = sorted(directory.glob("*.npy"))
        if not paths:
            raise FileNotFoundError(f"{directory}: not seen by process {jax.process_index()}: share it, or its cache")
        return RowsWithArrays(rows, {path.stem: np.load(path, mmap_mode="r") for path in paths})

    data.train.require_rows()
    if isinstance(data.train.rows, Mixture):
        parts = {name: add(part.train.rows, part.digest) for name, part in data.parts.items()}
        rows = data.train.rows.with_parts(parts)
    else:
        rows = add(data.train.rows, data.digest)
    return dataclasses.replace(data, train=dataclasses.replace(data.train, rows=rows))


def _is_whole(directory: Path) -> bool:
    if not directory.exists():
        return False
    try:
        verify_cache(directory)
    except ValueError:
        return False
    return True


def _write(directory: Path, num_rows: int, batches: Iterator[_Arrays]) -> None:
    """Write batches into a file for each array. Every process iterates over the batches, and the first one writes."""

    def write(part: Path) -> dict[str, Any]:
        files: dict[str, np.memmap] = {}
        start = 0
        for batch in batches:
            for name, values in batch.items():
                if name not in files:
                    shape = (num_rows, *values.shape[1:])
                    path = part / f"{name}.npy"
                    files[name] = np.lib.format.open_memmap(path, mode="w+", dtype=values.dtype, shape=shape)
                files[name][start : start + len(values)] = values[: num_rows - start]
            start += len(next(iter(batch.values())))
        for file in files.values():
            file.flush()
        return {}

    if jax.process_index() == 0:
        open_cache(directory, write)
    else:
        for _ in batches:
            pass
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("arrays stored")


def _compute_batches(
    rows: Dataset, compute: Callable[[Mapping[str, Array]], Mapping[str, Array]], mesh: Mesh, batch_size: int
) -> Iterator[_Arrays]:
    """Yield the arrays of all rows, a batch at a time. Say how far it is every half minute."""
    batches = OrderedBatches(rows, batch_size, process=reader(mesh))
    pace = Throughput(len(batches))
    next_line = time.monotonic()
    for number, batch in enumerate(batches):
        measured = pace.tick(number)
        if jax.process_index() == 0 and time.monotonic() >= next_line:
            next_line += _LINE_SECONDS
            done = number * batch_size
            show(f"the teacher has read {done:,} of {len(rows):,} rows  {format_metrics({}, measured)}".rstrip())
        known = {name: batch[name] for name in BATCH_KEYS if name in batch}
        yield _fetch(compute(place_batch(known, mesh)))


def _fetch(arrays: Mapping[str, Array]) -> _Arrays:
    """Return whole arrays on the host, in each of several processes."""
    if jax.process_count() == 1:
        return jax.device_get(dict(arrays))
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(dict(arrays), tiled=True)
