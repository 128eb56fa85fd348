"""Metrics of a run: one line of JSON a step, the same bytes whether or not the run was interrupted.

    with Metrics(out / "metrics.jsonl") as metrics:
        metrics.log(step, loss=loss)                  # device arrays: kept where they are, fetched every few steps

Nothing that a clock tells goes in here: `Run` writes that to `timing.jsonl`.
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
    """Appends `{"step": 10, "loss": 2.5, ...}` to `path`, and tells the `trackers`.

    Values stay on the device until `every` steps have come together; they are then fetched in one transfer, all but
    the newest step's, which the device may still be computing: logging does not wait. NaN and infinity are written as
    the strings "nan", "inf" and "-inf". In a run of several processes only the first one writes.
    """

    def __init__(self, path: Path, *, fetch_every: int = 10, trackers: Sequence[Tracker] = ()):
        self.path = Path(path)
        self.fetch_every = fetch_every
        self._trackers = trackers
        self._pending: dict[int, dict[str, Value]] = {}

    def log(self, step: int, **values: Value) -> list[Record]:
        """Take `values` of `step`, and return the lines that were fetched on this occasion: mostly none."""
        self._pending.setdefault(step, {}).update(values)
        return self._fetch(keep=1) if len(self._pending) > self.fetch_every else []

    def flush(self) -> list[Record]:
        """Fetch and write all that was logged: before a checkpoint, so that what it continues is on disk."""
        return self._fetch(keep=0)

    def close(self) -> None:
        """Flush, and close the trackers."""
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
        waiting = [self._pending.pop(step) for step in steps]
        # Lists of values, not mappings, of which JAX would sort the names.
        fetched = jax.device_get([list(values.values()) for values in waiting])
        lines = [
            dict(step=step) | to_jsonable(dict(zip(values, numbers, strict=True)))
            for step, values, numbers in zip(steps, waiting, fetched, strict=True)
        ]
        if jax.process_index() == 0:
            append_records(self.path, lines)
            for line in lines:
                values = {name: value for name, value in line.items() if name != "step"}
                for tracker in self._trackers:
                    tracker.log(line["step"], values)
        return lines


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Write `lines` to the end of `path`, in one go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write("".join(json.dumps(to_jsonable(line), allow_nan=False) + "\n" for line in records))


def read_metrics(path: Path) -> list[Record]:
    """The lines of a run, one a step, in order; what was logged in several goes is merged.

    A line that a killed process wrote half is left out. The file need not exist.
    """
    lines: dict[int, Record] = {}
    for line in _read_complete_records(path):
        lines.setdefault(line["step"], {}).update(line)
    return [lines[step] for step in sorted(lines)]


def truncate_after(path: Path, step: int) -> None:
    """Leave in `path` the lines up to `step` alone: a run that is resumed there writes the others again."""
    if path.exists():
        write_text(
            path, "".join(json.dumps(line) + "\n" for line in _read_complete_records(path) if line["step"] <= step)
        )


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
