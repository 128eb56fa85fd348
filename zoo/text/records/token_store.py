"""Write the tokens of records once, by parallel workers, and open them memory-mapped.

A store is a cached directory (token_cache.py). Texts lie one after another, in the order of their records:

| file | dtype | holds |
|---|---|---|
| tokens.bin | uint8, uint16 or uint32 | the tokens of all texts |
| mask.bin | uint8 | 1 for a token that is trained on |
| starts.npy | int64, "texts + 1" | the first token of each text |
| shares.npy | float64, "items" | a hash of each item in [0, 1), by which items are held out |
| labels.npy | float32, "items" | labels, of labeled records |
| fields.jsonl, field_starts.npy | | further fields of prompts, or where the pictures of a text are, a line each |
| pictures.npy | int64, "items 2" | pictures of each text, and images or patches of these, of records with images |

The bytes do not depend on the number of workers: units of the files are written in their order, whoever encoded them.
"""

import collections
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from zoo._files import to_jsonable, write_text
from zoo._terminal import format_bytes, show
from zoo.text.token_cache import choose_token_dtype

from .pictures import place_pictures
from .record_file import RecordError, RecordFile, Unit, drop_nulls
from .record_kinds import Encoding, Item, RecordKind

Job = tuple[RecordFile, Unit]
MAX_LISTED = 20
"""Faults that are listed, and after which reading stops."""
_MAX_PLACES = 3
"""Places that are listed for one fault."""
MAX_REJECTED = 0.01
"""Share of records that may be left out."""
_LINE_SECONDS = 30
WORKER_ENDED = (
    "a worker that tokenizes records ended: out of memory, or the script that called has no "
    '`if __name__ == "__main__":` around its work'
)


class RecordsError(ValueError):
    """Raised for records with faults. The message has the place of each, what was expected and what came."""


@dataclass
class EncodedUnit:
    """The texts of a unit of a file, and the faults in it."""

    tokens: bytes = b""
    mask: bytes = b""
    lengths: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)
    fields: list[bytes] = field(default_factory=list)
    pictures: list[tuple[int, int]] = field(default_factory=list)
    num_records: int = 0
    has_messages: bool = False
    """True if a chat template rendered one of its texts."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """Place, fault and record of each."""


@dataclass(frozen=True)
class TokenStore:
    """The arrays of an open store."""

    tokens: Integer[np.ndarray, "tokens"]
    mask: Integer[np.ndarray, "tokens"]
    starts: Int[np.ndarray, "texts_and_one"]
    shares: Float[np.ndarray, "items"]
    labels: Float[np.ndarray, "items"] | None
    directory: Path
    pictures: Int[np.ndarray, "items 2"] | None = None

    @classmethod
    def open(cls, directory: Path, vocab: int, *, is_labeled: bool, has_images: bool = False) -> "TokenStore":
        """Map the files of a store of a vocabulary."""
        starts = np.load(directory / "starts.npy", mmap_mode="r")
        return cls(
            _map(directory / "tokens.bin", choose_token_dtype(vocab)),
            _map(directory / "mask.bin", np.uint8),
            starts,
            np.load(directory / "shares.npy", mmap_mode="r"),
            np.load(directory / "labels.npy", mmap_mode="r") if is_labeled else None,
            directory,
            np.load(directory / "pictures.npy", mmap_mode="r") if has_images else None,
        )

    def read_fields(self, item: int) -> dict[str, Any]:
        """Return the further fields of a prompt, or where the pictures of a text are."""
        start, stop = np.load(self.directory / "field_starts.npy", mmap_mode="r")[item : item + 2]
        with (self.directory / "fields.jsonl").open("rb") as file:
            file.seek(int(start))
            return json.loads(file.read(int(stop - start)))


def encode_unit(job: Job, kind: RecordKind, encoding: Encoding) -> EncodedUnit:
    """Read and encode the records of a unit."""
    file, unit = job
    result = EncodedUnit()
    numbers = []
    records = []
    faults: list[tuple[int, RecordError, Any]] = []
    for number, record in file.read(unit):
        result.num_records += 1
        if isinstance(record, RecordError):
            faults.append((number, record, None))
        else:
            if file.adds_nulls:
                record = {name: drop_nulls(value) for name, value in record.items()}  # columns stay
            if encoding.images is not None:
                try:
                    record = place_pictures(record, file, encoding.images)
                except RecordError as error:
                    faults.append((number, error, record))
                    continue
            numbers.append(number)
            records.append(record)
    dtype = choose_token_dtype(encoding.tokenizer.vocab)
    tokens = []
    masks = []
    for number, record, items in zip(numbers, records, kind.encode_all(records, encoding), strict=True):
        if isinstance(items, RecordError):
            faults.append((number, items, record))
            continue
        result.has_messages |= kind.has_messages(record)
        share = _hash_share(kind.find_key(record, encoding))
        for item in items:
            result.shares.append(share)
            if kind.is_labeled:
                result.labels.append(item.label)
            if encoding.images is not None:
                result.pictures.append((len(item.pictures), sum(picture.length for picture in item.pictures)))
                item = item._replace(fields=_describe_pictures(item, file, unit, number))
            if item.fields is not None:
                result.fields.append(json.dumps(to_jsonable(item.fields), ensure_ascii=False).encode() + b"\n")
            for text in item.texts:
                tokens.append(text.tokens.astype(dtype))
                masks.append(text.mask.astype(np.uint8))
                result.lengths.append(len(text.tokens))
    if tokens:
        result.tokens = np.concatenate(tokens).tobytes()
        result.mask = np.concatenate(masks).tobytes()
    for number, fault, record in sorted(faults, key=lambda found: found[0]):
        place = file.locate(unit, number)
        result.faults.append({"place": place, "fault": str(fault), "record": to_jsonable(record)})
    return result


def _describe_pictures(item: Item, file: RecordFile, unit: Unit, number: int) -> dict[str, Any]:
    """Return where the pictures of a text are, and the shapes with which they were counted."""
    return {
        "file": os.path.abspath(file.path),
        "unit": unit[:2],
        "number": number,
        "pictures": [picture.path for picture in item.pictures],
        "shapes": [picture.shape for picture in item.pictures],
    }


def write_store(
    directory: Path,
    files: Sequence[RecordFile],
    kind: RecordKind,
    encoding: Encoding,
    *,
    processes: int,
    rejected: Path | None = None,
) -> dict[str, Any]:
    """Write the store of `files` into `directory`; return the numbers of records and of rejected ones, and whether
    records have messages.

    - `processes`: workers; 1 encodes in this process.
    - `rejected`: where records with faults are written, at most 1% of all. By default they are an error.

    **Raises** `RecordsError` for faults, and `RuntimeError` if a worker dies.
    """
    jobs = [(file, unit) for file in files for unit in file.split()]
    num_records = 0
    has_messages = False
    faults: list[dict[str, Any]] = []
    with (
        _StoreWriter(directory, kind, has_images=encoding.images is not None) as writer,
        _Progress(sum(unit.num_bytes for _, unit in jobs)) as progress,
    ):
        for (_, unit), encoded in zip(jobs, _encode_in_order(jobs, kind, encoding, processes), strict=True):
            num_records += encoded.num_records
            has_messages |= encoded.has_messages
            faults += encoded.faults
            if rejected is None and len(faults) >= MAX_LISTED:
                break
            writer.append(encoded)
            progress.advance(unit.num_bytes, sum(encoded.lengths))
        else:
            writer.finish()
    if faults and rejected is None:
        raise RecordsError(
            f"{list_faults(faults)}\nNothing was written. Mend them, or leave them out: bad_records='skip' "
            "(--bad-records skip) writes them to a file, with their faults"
        )
    if faults and rejected is not None:
        write_text(rejected, "".join(json.dumps(fault, ensure_ascii=False) + "\n" for fault in faults))
        if len(faults) > MAX_REJECTED * num_records:
            raise RecordsError(
                f"{len(faults):,} of {num_records:,} records have faults, more than the {MAX_REJECTED:.0%} that may be "
                f"left out. All are in {rejected}:\n{list_faults(faults)}"
            )
        show(f"left out {len(faults):,} of {num_records:,} records; {rejected} has them, with their faults")
    about: dict[str, Any] = {"records": num_records, "rejected": len(faults)}
    if has_messages:
        about["messages"] = True
    return about


def list_faults(faults: Sequence[dict[str, Any]]) -> str:
    """Return a line for each of the first faults, one for equal ones, and the number of the others."""
    places: dict[str, list[str]] = {}
    for fault in faults[:MAX_LISTED]:
        places.setdefault(fault["fault"], []).append(fault["place"])
    lines = []
    for fault, found in places.items():
        more = f" and {len(found) - _MAX_PLACES:,} more" if len(found) > _MAX_PLACES else ""
        lines.append(f"{', '.join(found[:_MAX_PLACES])}{more}: {fault}")
    if len(faults) > MAX_LISTED:
        lines.append(f"and {len(faults) - MAX_LISTED:,} more")
    return "\n".join(lines)


class _StoreWriter:
    """Append units to the files of a store."""

    def __init__(self, directory: Path, kind: RecordKind, *, has_images: bool = False):
        self._directory = directory
        self._kind = kind
        self._tokens = (directory / "tokens.bin").open("wb")
        self._mask = (directory / "mask.bin").open("wb")
        self._fields = (directory / "fields.jsonl").open("wb") if kind.has_fields or has_images else None
        self._pictures: list[Any] | None = [np.zeros((0, 2), np.int64)] if has_images else None
        self._lengths: list[Any] = [[0]]
        self._field_lengths: list[Any] = [[0]]
        self._shares: list[Any] = [[]]
        self._labels: list[Any] = [[]]

    def __enter__(self) -> "_StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._tokens.close()
        self._mask.close()
        if self._fields is not None:
            self._fields.close()

    def append(self, encoded: EncodedUnit) -> None:
        self._tokens.write(encoded.tokens)
        self._mask.write(encoded.mask)
        self._lengths.append(encoded.lengths)
        self._shares.append(encoded.shares)
        self._labels.append(encoded.labels)
        if self._pictures is not None:
            self._pictures.append(np.array(encoded.pictures, np.int64).reshape(-1, 2))
        if self._fields is not None:
            self._fields.write(b"".join(encoded.fields))
            self._field_lengths.append([len(line) for line in encoded.fields])

    def finish(self) -> None:
        """Write what is known once all units are there."""
        np.save(self._directory / "starts.npy", np.cumsum(np.concatenate(self._lengths), dtype=np.int64))
        np.save(self._directory / "shares.npy", np.concatenate(self._shares))
        if self._kind.is_labeled:
            np.save(self._directory / "labels.npy", np.concatenate(self._labels).astype(np.float32))
        if self._pictures is not None:
            np.save(self._directory / "pictures.npy", np.concatenate(self._pictures))
        if self._fields is not None:
            starts = np.cumsum(np.concatenate(self._field_lengths), dtype=np.int64)
            np.save(self._directory / "field_starts.npy", starts)


def count_default_processes() -> int:
    """Return the number of workers by default: a core each, at most 8."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(cores, 8)


def _encode_in_order(
    jobs: Sequence[Job], kind: RecordKind, encoding: Encoding, processes: int
) -> Iterator[EncodedUnit]:
    """Yield the texts of each job in order. A few units more than there are workers are in flight: the results of a
    large source would not fit in memory."""
    if min(processes, len(jobs)) <= 1:
        for job in jobs:
            yield encode_unit(job, kind, encoding)
        return
    waiting: collections.deque[Future[EncodedUnit]] = collections.deque()
    pool = start_workers(min(processes, len(jobs)), kind, encoding)
    try:
        for job in jobs:
            waiting.append(pool.submit(encode_in_worker, job))
            if len(waiting) > 3 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RuntimeError(f"{WORKER_ENDED}. processes=1 (--data-processes 1) takes no workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def start_workers(count: int, kind: RecordKind, encoding: Encoding) -> ProcessPoolExecutor:
    """Start processes that `encode_in_worker` runs in, each with its own tokenizer."""
    # Spawned: the fork of a process that runs JAX deadlocks.
    return ProcessPoolExecutor(count, get_context("spawn"), _start_worker, (kind, encoding))


def encode_in_worker(job: Job) -> EncodedUnit:
    """Read and encode the records of a unit, in a process of `start_workers`."""
    return _encode_in_worker(job)


def _start_worker(kind: RecordKind, encoding: Encoding) -> None:
    """Keep the tokenizer for all jobs of a worker, since reading its file takes long, and let it have one thread: there
    is a worker for each core."""
    global _encode_in_worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encode_in_worker = functools.partial(encode_unit, kind=kind, encoding=encoding)


_encode_in_worker: Callable[[Job], EncodedUnit]


class _Progress:
    """A bar on a terminal: bytes of all, tokens per second, time left; elsewhere a line every half minute. Nothing for
    what takes a second."""

    def __init__(self, num_bytes: int):
        self._num_bytes = num_bytes
        self._done = 0
        self._tokens = 0
        self._start = time.monotonic()
        self._next_line = _LINE_SECONDS
        self._bar: Any = None

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num_bytes: int, tokens: int) -> None:
        """Count a unit."""
        self._done += num_bytes
        self._tokens += tokens
        seconds = time.monotonic() - self._start
        speed = f"{self._tokens / max(seconds, 1e-3) / 1e6:.2f} M tokens/s"
        if not sys.stderr.isatty():
            if seconds > self._next_line:
                self._next_line = seconds + _LINE_SECONDS
                show(
                    f"tokenized {format_bytes(self._done)} of {format_bytes(self._num_bytes)}, {speed}", file=sys.stderr
                )
            return
        if self._bar is None and seconds > 1:
            self._begin()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, speed=speed)

    def _begin(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = "tokenizing", BarColumn(bar_width=24), DownloadColumn(), TextColumn("{task.fields[speed]}")
        self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
        self._task = self._bar.add_task("", total=self._num_bytes, speed="")
        self._bar.start()


def hold_out(shares: Float[np.ndarray, "items"], fraction: float) -> Bool[np.ndarray, "items"]:
    """Choose the items to hold out, at least one, and not all: the same on every machine."""
    if not fraction or len(shares) < 2:
        return np.zeros(len(shares), bool)
    held_out = shares < fraction
    if not held_out.any():
        held_out = shares == shares.min()
    if held_out.all():
        held_out = shares > shares.min()
    return held_out


def _hash_share(key: str) -> float:
    """Return a hash of a text in [0, 1)."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _map(path: Path, dtype: Any) -> np.ndarray:
    """Map a file of numbers. An empty file cannot be mapped."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r")
