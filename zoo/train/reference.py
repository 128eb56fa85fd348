"""The reference of a preference loss, computed once: log p of every target under a frozen model, kept on the disk.

    data = precompute_reference(model, data, mesh, batch_size=8)    # one pass over all rows, unless they are there
    for batch in data.train.batches(batch_size=8): ...              # with `reference`, "batch seq"

A step then holds no second model, and runs none: 4 bytes for each position of a row take its place.
"""

import dataclasses
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Float, Shaped

from zoo._checks import BATCH_KEYS
from zoo._files import user_cache_folder
from zoo._terminal import show
from zoo.models import Decoder, log_probs
from zoo.parallel import Mesh, cast, leaves, place_batch, reader, spmd
from zoo.parallel.fingerprint import fingerprint
from zoo.text.batches import Dataset, OrderedBatches
from zoo.text.mixture import Mixture
from zoo.text.records import Records, RecordSplit
from zoo.text.records.source import digest_values
from zoo.text.token_cache import open_cache, verify_cache

from .interrupt import is_set_on_any_process
from .processes import run_on_first
from .progress import Throughput, format_metrics

_FILE = "reference.npy"
_VERSION = 1  # raised whenever the format of a store changes, or how its numbers are computed
_LINE_SECONDS = 30


class ReferencedRows:
    """Rows of a dataset with `reference`, log p of each target: a `Dataset`."""

    def __init__(self, rows: Dataset, reference: Float[np.ndarray, "rows seq"]):
        self._rows = rows
        self._reference = reference

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Shaped[np.ndarray, "..."]]:
        return self._rows[index] | {"reference": np.asarray(self._reference[index])}


def precompute_reference(
    model: Decoder,
    data: Records,
    mesh: Mesh,
    *,
    batch_size: int,
    dtype: str = "float32",
    cache: str | Path | None = None,
) -> Records:
    """Add to each row of `data` its `reference`: log p of each target under `model`, float32, 0 without a target.

    - `model`: placed on `mesh`, and frozen: the model that training starts from.
    - `batch_size`: rows at a time, over all processes.
    - `dtype`: of the computation. Take that of training, or the log-ratios begin further from 0.
    - `cache`: a folder for the numbers, in subfolders named by hashes of the rows, of the model's parameters and
      settings, and of `dtype`: another model has another subfolder. By default `equizoo/references` in the user's cache
      folder.

    A pass that ends early leaves nothing behind. With several processes each of them holds all of the numbers, 4 bytes
    per position, until they are written.

    **Raises** `ValueError` for a model with adapters, without which it is the reference.
    """
    if any(leaf.adapter_parameter for leaf in leaves(eqx.filter(model, eqx.is_array))):
        raise ValueError(
            "the reference has adapters, which are trained: pass the model without them, or take "
            "zoo.adapters.remove(model) inside the loss, which needs no pass over the data"
        )
    folder = Path(cache or user_cache_folder() / "references")
    identity = _VERSION, fingerprint(model), _describe_settings(model), dtype
    function = spmd(partial(_compute_log_probs, dtype=dtype), mesh, out="batch seq")

    def add(rows: Dataset, digest: str, split: str) -> Dataset:
        if not len(rows):
            return rows
        directory = folder / digest_values(identity, digest, split, _describe_plan(rows))
        compute = partial(_compute_rows, function, model, rows, mesh, batch_size)
        return ReferencedRows(rows, _open_store(directory, compute))

    def add_to_split(split: RecordSplit) -> RecordSplit:
        if isinstance(split.rows, Mixture):
            parts = {name: add(part.train.rows, part.digest, split.name) for name, part in data.parts.items()}
            return dataclasses.replace(split, rows=split.rows.with_parts(parts))
        return dataclasses.replace(split, rows=add(split.rows, data.digest, split.name))

    return dataclasses.replace(data, train=add_to_split(data.train), validation=add_to_split(data.validation))


def _compute_log_probs(model: Decoder, batch: dict[str, Array], *, dtype: str) -> Float[Array, "batch seq"]:
    return log_probs(cast(model, dtype), batch)


def _describe_plan(rows: Dataset) -> list[int]:
    """Return the number of rows and hashes of three of them: the same texts may be packed by another plan."""
    numbers = (0, len(rows) // 2, len(rows) - 1)
    return [len(rows), *(zlib.crc32(rows[number]["tokens"].tobytes()) for number in numbers)]


def _describe_settings(model: Decoder) -> str:
    """Return everything that a model has besides its arrays, such as the base of its rotary embeddings."""
    settings = eqx.tree_pformat(eqx.filter(model, eqx.is_array, inverse=True))
    return re.sub(r" at 0x[0-9a-f]+", "", settings)  # addresses of functions


def _open_store(directory: Path, compute: Callable[[], Iterator[np.ndarray]]) -> Float[np.ndarray, "rows seq"]:
    """Map the numbers of a directory. They are computed if they are missing, or damaged, for any process."""
    if is_set_on_any_process(not _is_whole(directory)):
        values = np.concatenate(list(compute()))  # every process takes part
        run_on_first(lambda: shutil.rmtree(directory, ignore_errors=True))

        def write(part: Path) -> dict[str, Any]:
            np.save(part / _FILE, values)
            return {}

        open_cache(directory, write)
    return np.load(directory / _FILE, mmap_mode="r")


def _is_whole(directory: Path) -> bool:
    if not directory.exists():
        return False
    try:
        verify_cache(directory)
    except ValueError:
        return False
    return True


def _compute_rows(
    function: Callable, model: Decoder, rows: Dataset, mesh: Mesh, batch_size: int
) -> Iterator[Float[np.ndarray, "rows seq"]]:
    """Yield the numbers of all rows, a batch at a time. Say so, and after that how far it is every half minute."""
    batches = OrderedBatches(rows, batch_size, process=reader(mesh))
    pace = Throughput(len(batches))
    next_line = time.monotonic()
    for number, batch in enumerate(batches):
        measured = pace.tick(number)
        if jax.process_index() == 0 and time.monotonic() >= next_line:
            next_line += _LINE_SECONDS
            done = number * batch_size
            show(f"reference: log p of {done:,} of {len(rows):,} rows  {format_metrics({}, measured)}".rstrip())
        known = {name: batch[name] for name in BATCH_KEYS if name in batch}
        values = function(model, place_batch(known, mesh))
        yield np.asarray(multihost_utils.process_allgather(values, tiled=True))[: len(rows) - number * batch_size]
