"""Streams of records that are tokenized and packed while a run trains, for what does not fit on a disk.

    batches = stream_records("web/*.parquet", tokenizer=tokenizer, seq_len=2048, batch_size=8)
    batch = next(batches)

Units of the files are shuffled and shared by the processes. The texts of a window are packed by `PackedRows` and come
as shuffled rows.
"""

import atexit
import copy
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np
from jaxtyping import Int, Integer, Shaped, UInt8

from zoo._keywords import check_keywords
from zoo._optional import import_optional
from zoo.text.batches import assign_rows
from zoo.text.packing import PackedRows, TooLong
from zoo.text.token_cache import choose_token_dtype
from zoo.text.tokenizers import Tokenizer

from .in_memory import InMemory
from .source import (
    Reading,
    ReadingOptions,
    Source,
    describe_encoding,
    digest_values,
    find_weights,
    list_chosen,
    name_files,
    open_sources,
)
from .token_store import (
    MAX_LISTED,
    WORKER_ENDED,
    EncodedUnit,
    Job,
    RecordsError,
    encode_in_worker,
    encode_unit,
    list_faults,
    start_workers,
)

_logger = logging.getLogger("zoo")

_BATCHES_AHEAD = 4
_INSTEAD = "write the tokens once instead: train.load_records"


@check_keywords
def stream_records(
    source: Source,
    *,
    tokenizer: Tokenizer,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    window: int = 1024,
    process: tuple[int, int] | None = None,
    workers: int = 0,
    **reading: Unpack[ReadingOptions],
) -> "RecordStream":
    """Stream records as infinite batches of packed rows. Nothing is written: tokens are made again in each pass.

    Arguments and rows are as in `load_records`, but for

    - `batch_size`: rows per batch, over all processes.
    - `bad_records`: "skip" logs records with faults, the first 20 with their places, and counts all in `counts`.
    - `window`: texts that are packed together, as tightly as by `load_records`, and give rows in random order.
    - `process`: (index, count) of the units to read: `zoo.parallel.reader(mesh)`.
    - `workers`: processes that tokenize, for a script with `if __name__ == "__main__":` around its work; 0 takes a
      thread of this process. The batches do not depend on it.

    A unit of a file is read at once: 4 MiB of lines, a row group, 4,096 rows, or the whole of a compressed file. Each
    process holds the texts of a window and of a few units in memory.

    A stream promises less than `load_records`. It does not promise

    - exact passes: a window may hold texts of two passes, and processes go through their units at their own pace;
    - to resume on another number of processes, which is refused: some targets would come twice in a pass, others never;
    - that faults are found before the first step: one stops the run when its unit is read;
    - a validation split: hold out files of your own.

    **Raises** `FileNotFoundError` for a missing source; `RecordsError`, a `ValueError`, if the first record is of no
    kind; `ValueError` for fewer units than processes, or a number of processes that does not divide `batch_size`;
    `NotImplementedError` for mixtures, and for labeled records, prompts and images.
    """
    for name, value, least in (("seq_len", seq_len, 1), ("window", window, 1), ("workers", workers, 0)):
        if value < least:
            raise ValueError(f"{name} is {value}: expected at least {least}")
    if find_weights(source) is not None:
        raise NotImplementedError(f"a mixture of sources is not streamed: {_INSTEAD}")
    (opened,) = open_sources([source], tokenizer=tokenizer, **reading)
    if opened.encoding.images is not None:
        raise NotImplementedError(f"records with images are not streamed: {_INSTEAD}")
    if opened.kind.is_labeled or opened.kind.has_fields:
        raise NotImplementedError(f"records of the kind {opened.kind.name} are not streamed: {_INSTEAD}")
    options = {"seq_len": seq_len, "seed": seed, "window": window, "workers": workers}
    return RecordStream(opened, batch_size=batch_size, process=process, **options)


class _Item(NamedTuple):
    """Texts that stay together in a row, one after another."""

    tokens: Integer[np.ndarray, "tokens"]
    mask: UInt8[np.ndarray, "tokens"]
    lengths: Int[np.ndarray, "texts"]


class RecordStream(Iterator):
    """Infinite iterator over batches of packed rows, made by `stream_records`.

    - `kind`: text, chat, completion or preference.
    - `counts`: what this process has read since it began or was restored, a little ahead of the batches: the numbers of
      records, of those rejected for faults, and of items cut or dropped because they are longer than a row.
    - `digest`: a hash of the names and sizes of the files, without reading them, and of everything else that the tokens
      depend on. A run keeps it, and is not resumed on other data.
    - `chosen`: as of `RecordSplit`.
    """

    def __init__(
        self,
        reading: Reading,
        *,
        seq_len: int,
        batch_size: int,
        seed: int,
        window: int,
        process: tuple[int, int] | None,
        workers: int,
    ):
        self._process, self._rows = assign_rows(batch_size, process)
        self._grain = import_optional("grain", "pip install 'equizoo[train]'")
        self._jobs: list[Job] = [(file, unit) for file in reading.files for unit in file.split()]
        _, num_processes = self._process
        if len(self._jobs) < num_processes:
            raise ValueError(
                f"{name_files(reading.files)}: {len(self._jobs)} units for {num_processes} processes, and each process "
                f"reads units of its own: split the records into more files, or {_INSTEAD}"
            )
        self._reading = reading
        self._seq_len = seq_len
        self._too_long: TooLong = reading.too_long or reading.kind.too_long
        self._workers = workers
        self._setting = {"processes": num_processes, "seed": seed, "window": window}
        """What a position is only valid with."""
        self.kind = reading.kind.name
        self.batch_size = batch_size
        self.digest = _digest(reading, seq_len, self._too_long)
        self.chosen = list_chosen(reading.encoding.template)
        self.counts: Counter[str] = Counter()
        self._empty_units: set[int] | None = set()
        """Units without an item, until there is one."""
        self._position: dict[str, Any] | None = None
        self._iterator: Any = None
        self._pool: ProcessPoolExecutor | None = None

    @property
    def state(self) -> dict[str, Any]:
        """The position, as JSON: the number of processes, seed and window, and where each process stands.

        With several processes of JAX it is a collective: every process asks for it.
        """
        index, _ = self._process
        positions = {str(index): self._position}
        if jax.process_count() > 1:
            for gathered in _gather_json(positions):
                positions.update(gathered)
        return {**self._setting, "positions": dict(sorted(positions.items()))}

    def restore(self, state: Any) -> None:
        """Continue from a saved `state`, bit for bit. Other `workers` and another `batch_size` give the same rows.

        **Raises** `ValueError` if it was saved on another number of processes, or with another seed or window.
        """
        setting = self._setting
        index, count = self._process
        if not isinstance(state, Mapping) or not {*setting, "positions"} <= state.keys():
            raise ValueError(f"expected the state of a stream of records, got {str(state)[:60]!r}")
        if state["processes"] != count:
            raise ValueError(
                f"the stream was saved on {state['processes']} processes, and this run has {count}, which would read "
                f"some texts twice and others not at all. To resume on any number of processes, {_INSTEAD}"
            )
        for name in ("seed", "window"):
            if state[name] != setting[name]:
                raise ValueError(f"the stream was saved with {name}={state[name]}, and this one has {setting[name]}")
        if str(index) not in state["positions"]:
            raise ValueError(f"the state has the positions of other processes, and none of process {index}")
        self._stop_reading()
        self.counts.clear()
        self._position = state["positions"][str(index)]

    def __next__(self) -> dict[str, Shaped[np.ndarray, "batch ..."]]:
        try:
            if self._iterator is None:
                self._iterator = self._make_iterator()
                if self._position is not None:
                    self._iterator.set_state(self._position)
            batch = next(self._iterator)
        except BaseException:
            self.close()  # the iterator is past the unit that failed, and would go on without it
            raise
        self._position = self._iterator.get_state()
        return batch

    def close(self) -> None:
        """Stop threads and workers; the next batch starts them again."""
        self._stop_reading()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _stop_reading(self) -> None:
        atexit.unregister(self._stop_reading)
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _make_iterator(self) -> Any:
        """Return an iterator of grain over the batches, from the first on."""
        grain = self._grain
        flatten = grain.experimental.FlatMapIterDataset
        seed = self._setting["seed"]
        index, count = self._process
        threads = max(self._workers, 1)
        reading = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
        units = grain.MapDataset.range(len(self._jobs)).seed(seed).shuffle().repeat(None)[index::count]
        encoded = units.map(self._start_encoder()).to_iter_dataset(reading)
        items = flatten(encoded, _FlatMap(self._list_items))
        packed = items.batch(self._setting["window"], batch_fn=list).random_map(self._pack, seed=seed + index)
        rows = flatten(packed, _FlatMap(_keep))
        batches = rows.batch(self._rows, drop_remainder=True)
        ahead = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=_BATCHES_AHEAD)
        atexit.register(self._stop_reading)  # its thread is a daemon, and Python may crash that ends below one
        return iter(ahead)

    def _start_encoder(self) -> Callable[[int], tuple[int, EncodedUnit]]:
        """Return the function that reads and encodes the unit with a number: in a worker, or where it is called."""
        kind = self._reading.kind
        encoding = self._reading.encoding
        if not self._workers:
            # A tokenizer is told at each call whether to find special tokens: two threads may not share one.
            encoding = copy.deepcopy(encoding)

            def encode(number: int) -> tuple[int, EncodedUnit]:
                return number, encode_unit(self._jobs[number], kind, encoding)

            return encode
        pool = self._pool or start_workers(self._workers, kind, encoding)
        self._pool = pool

        def encode_elsewhere(number: int) -> tuple[int, EncodedUnit]:
            try:
                return number, pool.submit(encode_in_worker, self._jobs[number]).result()
            except BrokenProcessPool:
                raise RuntimeError(f"{WORKER_ENDED}. workers=0 takes none") from None

        return encode_elsewhere

    def _list_items(self, unit: tuple[int, EncodedUnit]) -> list[_Item]:
        """Return the items of an encoded unit, without those that are too long for a row."""
        number, encoded = unit
        self.counts["records"] += encoded.num_records
        if encoded.faults:
            self._report_faults(encoded.faults)
        lengths = np.array(encoded.lengths, np.int64).reshape(-1, self._reading.kind.texts_per_item)
        is_long = (lengths - 1).sum(axis=1) > self._seq_len
        is_kept = np.ones(len(lengths), bool)
        if self._too_long == "drop":
            is_kept = ~is_long
            self.counts["dropped"] += int(is_long.sum())
        else:
            self.counts["cut"] += int(is_long.sum())
        self._require_items(number, bool(is_kept.any()))
        tokens = np.frombuffer(encoded.tokens, choose_token_dtype(self._reading.encoding.tokenizer.vocab))
        mask = np.frombuffer(encoded.mask, np.uint8)
        stops = np.cumsum(lengths.sum(axis=1))
        starts = stops - lengths.sum(axis=1)
        texts = [slice(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        return [_Item(tokens[texts[i]], mask[texts[i]], lengths[i]) for i in np.flatnonzero(is_kept).tolist()]

    def _pack(self, window: list[_Item], rng: np.random.Generator) -> Any:
        """Return the rows of a window in random order. Each is made when it is read."""
        lengths = np.concatenate([item.lengths for item in window])
        rows = PackedRows(
            np.concatenate([item.tokens for item in window]),
            np.concatenate([item.mask for item in window]),
            np.concatenate([[0], np.cumsum(lengths)]),
            self._seq_len,
            texts_per_item=self._reading.kind.texts_per_item,
            too_long=self._too_long,
        )
        return self._grain.MapDataset.source(rows).seed(int(rng.integers(2**31))).shuffle()

    def _report_faults(self, faults: Sequence[dict[str, Any]]) -> None:
        """Log the first faults with their places, and then their number at each power of two.

        **Raises** `RecordsError` if none may be left out.
        """
        if not self._reading.skips:
            raise RecordsError(
                f"{list_faults(faults)}\nMend them, or leave them out: bad_records='skip' logs and counts them"
            )
        before = self.counts["rejected"]
        self.counts["rejected"] += len(faults)
        for fault in faults[: max(MAX_LISTED - before, 0)]:
            _logger.warning("left out %s: %s", fault["place"], fault["fault"])
        rejected = self.counts["rejected"]
        has_doubled = rejected.bit_length() > before.bit_length()
        if rejected > MAX_LISTED and (has_doubled or before <= MAX_LISTED):
            _logger.warning("left out %s of %s records so far", f"{rejected:,}", f"{self.counts['records']:,}")

    def _require_items(self, unit: int, has_items: bool) -> None:
        """**Raises** `ValueError` once all units were read, and there is nothing to make a row of."""
        if self._empty_units is None:
            return
        if has_items:
            self._empty_units = None
            return
        self._empty_units.add(unit)
        if len(self._empty_units) == len(self._jobs):
            counts = self.counts
            raise ValueError(
                f"{name_files(self._reading.files)}: no records there that make a row: of {counts['records']:,}, "
                f"{counts['rejected']:,} have faults and {counts['dropped']:,} are longer than {self._seq_len} "
                "targets"
            )


class _FlatMap(NamedTuple):
    """A `grain.experimental.FlatMapTransform`, without grain being imported here."""

    flat_map: Callable[[Any], Any]


def _keep(rows: Any) -> Any:
    return rows


def _digest(reading: Reading, seq_len: int, too_long: TooLong) -> str:
    """Return a hash of everything that the rows depend on, but the bytes of the files."""
    described = []
    for file in reading.files:
        if isinstance(file, InMemory):
            described.append(file.digest())
        else:
            described.append([file.path.name, file.path.stat().st_size])
    return digest_values(described, describe_encoding(reading.kind, reading.encoding), seq_len, too_long, reading.skips)


def _gather_json(value: Any) -> list[Any]:
    """Return the `value` of every process, in each of them."""
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.array(text.size, np.int32)))
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: text.size] = text
    texts = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(bytes(text[:length])) for text, length in zip(texts, lengths.tolist(), strict=True)]
