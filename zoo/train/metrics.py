"""Metrics of a run: one JSON line per step, byte for byte the same whether or not the run was interrupted.

    with Metrics(out / "metrics.jsonl") as metrics:
        metrics.log(step, loss=loss)                  # device arrays stay on the device, fetched every few steps

Timings are not metrics: `Run` writes them to `timing.jsonl`.
"""

import errno
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Shaped

from zoo._files import copy_file, open_to_append, parse_json, to_jsonable, write_text

from .trackers import Tracker

_log = logging.getLogger("zoo")

Value = float | int | np.number | Shaped[np.ndarray, "..."] | Shaped[Array, "..."]
Record = dict[str, Any]


class Metrics:
    """Append `{"step": 10, "loss": 2.5, ...}` to `path` and forward it to the `trackers`.

    Values stay on the device until the step after a multiple of `fetch_every`. They are then fetched in one transfer,
    except the values of this newest step, which the device may still be computing: logging does not block. NaN and
    infinity are written as the strings "nan", "inf" and "-inf". With several processes, only the first one writes.
    """

    def __init__(self, path: Path, *, fetch_every: int = 10, trackers: Sequence[Tracker] = ()):
        self.path = Path(path)
        self.fetch_every = fetch_every
        self._trackers = trackers
        self._file = MetricsFile(path)
        self._pending: dict[int, dict[str, Value]] = {}

    def log(self, step: int, **values: Value) -> list[Record]:
        """Log `values` for `step`. Return the records fetched by this call, usually none."""
        self._pending.setdefault(step, {}).update(values)
        first, last = ((step - 1) // self.fetch_every for step in (next(iter(self._pending)), step))
        if last <= first:
            return []
        return self._fetch(keep=1)

    def flush(self) -> list[Record]:
        """Fetch and write everything logged so far. Call it before saving a checkpoint."""
        return self._fetch(keep=0)

    def close(self) -> None:
        """Flush and close the trackers. **Raises** `OSError` if some records could not be written because the disk is
        full."""
        self.flush()
        if jax.process_index() == 0:
            for tracker in self._trackers:
                tracker.close()
            self._file.close()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _fetch(self, keep: int) -> list[Record]:
        steps = list(self._pending)[: len(self._pending) - keep]
        pending = [self._pending.pop(step) for step in steps]
        # Lists of values, because JAX would sort the keys of mappings.
        fetched = jax.device_get([list(values.values()) for values in pending])
        records = [
            dict(step=step) | to_jsonable(dict(zip(values, numbers, strict=True)))
            for step, values, numbers in zip(steps, pending, fetched, strict=True)
        ]
        if jax.process_index() == 0:
            self._file.append(records)
            for record in records:
                values = {name: value for name, value in record.items() if name != "step"}
                for tracker in self._trackers:
                    tracker.log(record["step"], values)
        return records


class MetricsFile:
    """Append records to a file of JSON lines. If the disk has no room for some, they wait in memory for the next
    call."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._waiting: list[Record] = []

    def append(self, records: Iterable[Record]) -> None:
        """Append `records`, after the records that wait. Warns when the first ones have to."""
        waited = bool(self._waiting)
        self._waiting += records
        try:
            append_records(self.path, self._waiting)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not waited:
                _log.warning(
                    "%s: no space is left on the disk: the lines are kept in memory and tried again", self.path
                )
            return
        self._waiting.clear()

    def close(self) -> None:
        """Try once more. **Raises** `OSError` if records still wait, which are lost then."""
        if self._waiting:
            self.append([])
        if self._waiting:
            raise OSError(f"{self.path}: no space is left on the disk for its last {len(self._waiting)} lines")


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Append `records` to `path`. If that fails, the file stays as it was."""
    text = "".join(json.dumps(to_jsonable(record), allow_nan=False) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_to_append(path) as file:
        size = os.fstat(file.fileno()).st_size
        left = text.encode()
        try:
            while left:
                left = left[os.write(file.fileno(), left) :]
        except OSError:
            os.ftruncate(file.fileno(), size)
            raise


def read_metrics(path: Path) -> list[Record]:
    """Read the metrics of a run: one record per step, in order, with records of the same step merged.

    Drops an incomplete last line, left by a killed process. The file need not exist. **Raises** `ValueError`, with the
    line's number, for a damaged line.
    """
    records: dict[int, Record] = {}
    for number, record in _parse_lines(path):
        if isinstance(record, str):
            raise ValueError(f"{path}, line {number}: {record}: mend or delete the line")
        records.setdefault(record["step"], {}).update(record)
    return [records[step] for step in sorted(records)]


def truncate_after(path: Path, step: int) -> None:
    """Drop the records of `path` after `step`, which a resumed run writes again.

    Damaged lines are dropped with a warning; the original file is kept next to it, as `metrics.jsonl.damaged`.
    """
    if not path.exists():
        return
    lines = list(_parse_lines(path))
    if damaged := [(number, reason) for number, reason in lines if isinstance(reason, str)]:
        kept = path.with_name(f"{path.name}.damaged")
        copy_file(path, kept)
        number, reason = damaged[0]
        more = f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        _log.warning("%s, line %d: passed over, %s%s; the file as it was is %s", path, number, reason, more, kept.name)
    records = [record for _, record in lines if not isinstance(record, str) and record["step"] <= step]
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def _parse_lines(path: Path) -> Iterator[tuple[int, Record | str]]:
    """Yield number and record of each complete line, or the reason why the line is not a record."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = parse_json(line)
                if isinstance(record, dict) and type(record.get("step")) is int:
                    yield number, record
                else:
                    yield number, "no record of a step"
            except ValueError as error:
                yield number, f"not JSON ({error})"
