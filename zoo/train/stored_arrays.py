"""Arrays of every row of a dataset that a frozen model computes once, kept on the disk next to the tokens.

data = store_arrays(data, compute, mesh, name="teacher", model=model, identity="top 64", batch_size=8, folder=folder)
for batch in data.train.batches(batch_size=8): ...              # with the arrays that `compute` returned
"""

import dataclasses
import functools
import hashlib
import logging
import operator
import secrets
import shutil
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PyTree, Shaped

from zoo._checks import BATCH_KEYS
from zoo._terminal import show
from zoo.models.hf.spec import Origin
from zoo.parallel import Mesh, reader
from zoo.parallel.batch import fetch_arrays, place_batch
from zoo.parallel.fingerprint import fingerprint_all_arrays
from zoo.text.batches import Dataset, OrderedBatches
from zoo.text.mixture import Mixture
from zoo.text.records.records import Records, RecordSplit
from zoo.text.records.source import digest_values
from zoo.text.token_cache import open_cache, verify_cache

from .interrupt import is_set_on_any_process
from .processes import run_on_first
from .progress import Throughput, format_metrics

_Arrays = Mapping[str, Shaped[np.ndarray, "rows ..."]]
_LINE_SECONDS = 30
_LIBRARIES = ("zoo", "jax", "equinox", "numpy", "builtins")

_log = logging.getLogger("zoo")


class RowsWithArrays:
    """Rows of a dataset with further arrays, one element of each for every row: a `Dataset`."""

    def __init__(self, rows: Dataset, arrays: _Arrays):
        """**Raises** `ValueError` for arrays of another number of rows."""
        for name, array in arrays.items():
            if len(array) != len(rows):
                raise ValueError(f"{name} has {len(array):,} rows for {len(rows):,} rows: expected one for each")
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
    name: str,
    identity: Any,
    batch_size: int,
    folder: Path,
    model: PyTree = None,
    splits: Collection[str] = ("train",),
) -> Records:
    """Add arrays to each row of some splits. They are computed in one pass over the rows, unless they are there.

    - `compute`: from a placed batch to arrays "batch ...", by name. It runs in every process.
    - `name`: of the model, for the lines that say how far it is.
    - `identity`: what the arrays depend on besides the rows and the model, of values that JSON can write: options.
      Another identity or model, or other rows, are stored in another subfolder of `folder`.
    - `batch_size`: rows at a time, over all processes.
    - `model`: the frozen model that computes them. If it cannot be told from others (`identify_model`), the arrays are
      computed anew in each call, with a line in the log, and deleted at the end of the program.

    The first process writes, batch by batch, and all processes read: they share `folder`. Arrays that are damaged are
    computed again. A pass that ends early leaves none.

    **Raises** `OSError` if a process does not see the folder.
    """
    is_kept = True
    try:
        identified = identify_model(model)
    except UnidentifiedError as error:
        is_kept = False
        identified = run_on_first(lambda: secrets.token_hex(16))
        if jax.process_index() == 0:
            _log.warning("%s: the %s reads all rows anew in each run", error, name)

    def add(rows: Dataset, digest: str, split: str) -> Dataset:
        if not len(rows):
            return rows
        directory = folder / digest_values(identity, identified, digest, split, _describe_plan(rows))
        if is_set_on_any_process(not _is_whole(directory)):
            run_on_first(lambda: shutil.rmtree(directory, ignore_errors=True))
            _write(directory, len(rows), _compute_batches(name, rows, compute, mesh, batch_size))
        paths = sorted(directory.glob("*.npy"))
        if not paths:
            raise FileNotFoundError(f"{directory}: not seen by process {jax.process_index()}: share it, or its cache")
        stored = RowsWithArrays(rows, {path.stem: np.load(path, mmap_mode="r") for path in paths})
        if not is_kept and jax.process_index() == 0:
            weakref.finalize(stored, shutil.rmtree, directory, ignore_errors=True)
        return stored

    def add_to_split(split: RecordSplit) -> RecordSplit:
        if isinstance(split.rows, Mixture):
            parts = {key: add(part.train.rows, part.digest, split.name) for key, part in data.parts.items()}
            return dataclasses.replace(split, rows=split.rows.with_parts(parts))
        return dataclasses.replace(split, rows=add(split.rows, data.digest, split.name))

    data.train.require_rows()
    return dataclasses.replace(data, **{split: add_to_split(getattr(data, split)) for split in splits})


class UnidentifiedError(ValueError):
    """Raised for a model with a part that cannot be told from others."""


def identify_model(model: PyTree) -> list[Any]:
    """Return what the results of a model depend on: hashes of its arrays, and everything that it has besides them, such
    as the base of its rotary embeddings.

    **Raises** `UnidentifiedError` for functions and classes from outside of these libraries, and for functions without
    a name, such as an edit of `zoo.patch`: another one may have the same name.
    """
    return [fingerprint_all_arrays(model), _identify(model)]


def _identify(value: Any) -> Any:
    """Return what a setting is, of values that JSON can write."""
    if eqx.is_array(value) or isinstance(value, Origin):  # the file of a model does not matter
        return None
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, np.dtype):
        return str(value)
    if isinstance(value, Mapping):
        return [[_identify(key), _identify(x)] for key, x in value.items()]
    if isinstance(value, functools.partial):
        return ["partial", *map(_identify, (value.func, value.args, value.keywords))]
    if isinstance(value, list | tuple):
        return [_identify(x) for x in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _identify(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return [_identify(type(value)), fields]
    module = getattr(value, "__module__", None) or ""
    name = getattr(value, "__qualname__", repr(value))
    try:
        is_found = operator.attrgetter(name)(sys.modules[module]) is value
    except (LookupError, AttributeError):
        is_found = False
    if not is_found or module.partition(".")[0] not in _LIBRARIES:
        raise UnidentifiedError(f"the model has {name} of {module or type(value).__name__}, which may change")
    return f"{module}.{name}"


def _describe_plan(rows: Dataset) -> list[int]:
    """Return the number of rows and hashes of three of them: the same texts may be packed by another plan."""
    numbers = (0, len(rows) // 2, len(rows) - 1)
    return [len(rows), *(zlib.crc32(rows[number]["tokens"].tobytes()) for number in numbers)]


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
    name: str, rows: Dataset, compute: Callable[[Mapping[str, Array]], Mapping[str, Array]], mesh: Mesh, batch_size: int
) -> Iterator[_Arrays]:
    """Yield the arrays of all rows, a batch at a time. Say so, and after that how far it is every half minute."""
    batches = OrderedBatches(rows, batch_size, process=reader(mesh))
    pace = Throughput(len(batches))
    next_line = time.monotonic()
    for number, batch in enumerate(batches):
        measured = pace.tick(number)
        if jax.process_index() == 0 and time.monotonic() >= next_line:
            next_line += _LINE_SECONDS
            done = number * batch_size
            show(f"the {name} has read {done:,} of {len(rows):,} rows  {format_metrics({}, measured)}".rstrip())
        known = {key: batch[key] for key in (*BATCH_KEYS, "images") if key in batch}
        yield fetch_arrays(dict(compute(place_batch(known, mesh))))
