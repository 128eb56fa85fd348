"""Metrics of a run: one JSON line per step, byte for byte the same whether or not the run was interrupted.

    with Metrics(out / "metrics.jsonl") as metrics:
        metrics.log(step, loss=loss)                  # device arrays stay on the device, fetched every few steps

Timings are not metrics: `Run` writes them to `timing.jsonl`.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Shaped

from zoo._files import to_jsonable, write_text

from .trackers import Tracker

Value = float | int | np.number | Shaped[np.ndarray, "..."] | Shaped[Array, "..."]
Record = dict[str, Any]


class Metrics:
    """Append `{"step": 10, "loss": 2.5, ...}` to `path` and forward it to the `trackers`.

    Values stay on the device until the step after a multiple of `fetch_every`, then are fetched in one transfer, except
    those of this newest step, which the device may still be computing: logging does not block. NaN and infinity are written as
    the strings "nan", "inf" and "-inf". With several processes, only the first one writes.
    """

    def __init__(self, path: Path, *, fetch_every: int = 10, trackers: Sequence[Tracker] = ()):
        self.path = Path(path)
        self.fetch_every = fetch_every
        self._trackers = trackers
        self._pending: dict[int, dict[str, Value]] = {}

    def log(self, step: int, **values: Value) -> list[Record]:
        """Log `values` for `step`. Return the records fetched by this call, usually none."""
        self._pending.setdefault(step, {}).update(values)
        first, last = ((step - 1) // self.fetch_every for step in (next(iter(self._pending)), step))
        return self._fetch(keep=1) if last > first else []

    def flush(self) -> list[Record]:
        """Fetch and write everything logged so far. Call it before saving a checkpoint."""
        return self._fetch(keep=0)

    def close(self) -> None:
        """Flush and close the trackers."""
        self.flush()
        if jax.process_index() == 0:
            for tracker in self._trackers:
                tracker.close()

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
            append_records(self.path, records)
            for record in records:
                values = {name: value for name, value in record.items() if name != "step"}
                for tracker in self._trackers:
                    tracker.log(record["step"], values)
        return records


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Append `records` to `path` in a single write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write("".join(json.dumps(to_jsonable(record), allow_nan=False) + "\n" for record in records))


def read_metrics(path: Path) -> list[Record]:
    """Read the metrics of a run: one record per step, in order, those of the same step merged.

    Drops an incomplete last line, left by a killed process. The file need not exist.
    """
    records: dict[int, Record] = {}
    for record in _read_complete_records(path):
        records.setdefault(record["step"], {}).update(record)
    return [records[step] for step in sorted(records)]


def truncate_after(path: Path, step: int) -> None:
    """Drop the records of `path` after `step`, which a resumed run writes again."""
    if path.exists():
        records = [record for record in _read_complete_records(path) if record["step"] <= step]
        write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def _read_complete_records(path: Path) -> Iterable[Record]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith("\n"):
                return
            try:
                yield json.loads(text)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}): mend or delete the line") from error
