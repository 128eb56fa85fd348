"""The trackers of a run: made by name, resumed with it, and dropped when they fail.

    python recipes/transformer.py --track wandb tensorboard      # RunOptions(out, track=("wandb", "tensorboard"))

A tracker gets the configuration, the metrics, and at last the report and its samples. None stops a run: what one raises
is a warning, and drops it; `metrics.jsonl` has everything. A resumed run goes on as the same run of each tracker:
`trackers.json` keeps their ids.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo._files import read_json, to_jsonable, write_json

from .trackers import PACKAGES, Samples, TensorBoard, Tracker, WeightsAndBiases, import_tracker

_log = logging.getLogger("zoo")

_FILE = "trackers.json"


class Trackers:
    """The trackers of a run, as one: those of `names`, made at the first `open` or `log`, and the caller's `others`.

    The run is the one in `directory`, with the configuration `config`, and one of several in `group`. With `resume` it
    goes on as the runs that `trackers.json` names. What a tracker raises is a warning, and drops it.
    """

    def __init__(
        self,
        directory: Path,
        names: Sequence[str] = (),
        *,
        config: Mapping[str, Any],
        group: str | None = None,
        resume: bool = False,
        others: Sequence[Tracker] = (),
    ):
        self._directory = directory
        self._names = tuple(dict.fromkeys(names))
        self._config = config
        self._group = group
        self._resume = resume
        self._is_open = False
        self._trackers: dict[str, Any] = {f"{type(other).__name__} {at}": other for at, other in enumerate(others)}

    def open(self) -> None:
        """Start or resume the run of each of the `names`. A second call does nothing."""
        if self._is_open:
            return
        self._is_open = True
        path = self._directory / _FILE
        runs: dict[str, str | None] = dict.fromkeys(self._names)
        with self._drop_on_error(_FILE):
            if self._resume and path.exists():
                runs |= {name: run_id for name, run_id in read_json(path)["runs"].items() if name in runs}
        for name in self._names:
            with self._drop_on_error(name):
                self._trackers[name] = self._make_tracker(name, runs[name])
                runs[name] = self._trackers[name].run_id
        with self._drop_on_error(_FILE):
            if runs:
                write_json(path, {"group": self._group, "runs": runs})
            else:
                path.unlink(missing_ok=True)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.open()
        for name, tracker in list(self._trackers.items()):
            with self._drop_on_error(name):
                tracker.log(step, values)

    def log_report(self, report: Path, samples: Samples) -> None:
        """Give the report to the trackers of the `names`."""
        self.open()
        for name in self._names:
            if name in self._trackers:
                with self._drop_on_error(name):
                    self._trackers[name].log_report(report, samples)

    def close(self) -> None:
        for name in list(self._trackers):
            with self._drop_on_error(name):
                self._trackers.pop(name).close()

    def _make_tracker(self, name: str, run_id: str | None) -> Any:
        config = to_jsonable(self._config)
        if name == "tensorboard":
            return TensorBoard(self._directory / "tensorboard", config=config)
        run_name = self._directory.absolute().name
        return WeightsAndBiases(self._directory, config=config, name=run_name, group=self._group, run_id=run_id)

    @contextlib.contextmanager
    def _drop_on_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            reason = f"{type(error).__name__}: {error}"
            _log.warning("%s: %s failed and is left out, metrics.jsonl goes on (%s)", self._directory, name, reason)


def import_trackers(names: Sequence[str]) -> None:
    """Import the packages of trackers. **Raises** `ImportError` for one that is missing, with the command that installs
    it, and `ValueError` for an unknown name."""
    for name in names:
        if name not in PACKAGES:
            raise ValueError(f"name trackers out of {', '.join(PACKAGES)}, not {name}")
        import_tracker(name)


def track_report(directory: Path, report: Path, samples: Samples) -> None:
    """Give a report, and the prompts and continuations in it, to the trackers of the finished run in `directory`."""
    if not (directory / _FILE).exists():
        return
    try:
        kept = read_json(directory / _FILE)
        config = read_json(directory / "config.json")
        # The id is None if a tracker never started; a tracker of an older version may be unknown.
        names = [name for name, run_id in kept["runs"].items() if run_id is not None and name in PACKAGES]
        trackers = Trackers(directory, names, config=config, group=kept["group"], resume=True)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        _log.warning("%s: the report is not tracked (%s)", directory, error)
        return
    trackers.log_report(report, samples)
    trackers.close()
