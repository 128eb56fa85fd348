"""Experiment trackers: TensorBoard, Weights & Biases, any object with `log` and `close`.

    with train.Run(folder, config=config, trackers=[train.WeightsAndBiases(folder, mode="offline")]) as run: ...

Recipes name theirs, `--track wandb`, and `Trackers` makes them.
"""

import contextlib
import math
import os
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from zoo._optional import import_optional

PROJECT = "equizoo"
"""Project of Weights & Biases, unless `WANDB_PROJECT` names another."""

LARGEST = 64
"""Values of the largest array that is tracked. Larger ones, such as the load of each expert, are in `metrics.jsonl`."""

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""The package that each tracker writes with."""

Samples = Sequence[Sequence[str]]


@runtime_checkable
class Tracker(Protocol):
    """The interface of a tracker."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log `values`, plain Python numbers and lists of them, for `step`. NaN and infinity are strings. Steps are in
        order, but start again after an earlier step when a run is rewound."""
        ...

    def close(self) -> None:
        """Write everything pending. The last call."""
        ...


class TensorBoard:
    """Write metrics and texts to TensorBoard event files in `directory`."""

    run_id = "tensorboard"  # its files are the run

    def __init__(self, directory: Path, *, config: Mapping[str, Any] | None = None):
        self._directory = directory
        is_resumed = any(directory.glob("events.*"))
        self._last_step = math.inf if is_resumed else 0
        self._writer = self._make_writer()
        if config is not None:
            text = "\n".join(f"{name}: {value}" for name, value in config.items())
            self._writer.add_text("config", textwrap.indent(text, "    "))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if step < self._last_step:
            # TensorBoard then hides what was written for this step and later ones before a resume or a rewind.
            self._writer.close()
            self._writer = self._make_writer(purge_step=step)
        self._last_step = step
        for name, value in flatten_values(values).items():
            self._writer.add_scalar(name, value, step)

    def log_report(self, report: Path, samples: Samples) -> None:
        self._writer.add_text("report", str(report))
        if samples:
            self._writer.add_text("samples", _format_samples(samples))

    def close(self) -> None:
        self._writer.close()

    def _make_writer(self, **options: Any) -> Any:
        # Names of event files hold seconds only, and TensorBoard reads them in the order of their names.
        suffix = f".{time.time_ns()}"
        return import_tracker("tensorboard").SummaryWriter(str(self._directory), filename_suffix=suffix, **options)


class WeightsAndBiases:
    """Log to a Weights & Biases run, a new one or that of `run_id`; its files are in `directory`.

    - `options`: of `wandb.init`, such as mode="offline".

    Metrics are drawn over the metric "step": W&B's own step cannot go back when a run is resumed or rewound.
    """

    def __init__(
        self,
        directory: Path,
        *,
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
        group: str | None = None,
        run_id: str | None = None,
        **options: Any,
    ):
        self._wandb = import_tracker("wandb")
        self._run = self._wandb.init(
            **{
                "project": os.environ.get("WANDB_PROJECT", PROJECT),
                "dir": str(directory),
                "config": config,
                "name": name,
                "group": group,
                "id": run_id,
                "resume": "allow",
                "allow_val_change": True,
                **options,
            }
        )
        self._run.define_metric("*", step_metric="step", step_sync=False)
        self.run_id = self._run.id

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **flatten_values(values)})

    def log_report(self, report: Path, samples: Samples) -> None:
        values = {"report": self._wandb.Html(report.read_text(encoding="utf-8"), inject=False, data_is_not_path=True)}
        if samples:
            values["samples"] = self._wandb.Table(["prompt", "continuation"], [list(sample) for sample in samples])
        self._run.log(values)

    def close(self) -> None:
        self._run.finish()


def flatten_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Return logged numbers as floats by name: those of an array are `name/0`, `name/1`, in the order of its rows."""
    flat = {}
    for name, value in values.items():
        numbers = list(_list_numbers(value))
        is_array = isinstance(value, list)
        if len(numbers) <= LARGEST:
            flat |= {f"{name}/{index}" if is_array else name: number for index, number in enumerate(numbers)}
    return flat


def _list_numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for item in value:
            yield from _list_numbers(item)
    else:
        with contextlib.suppress(TypeError, ValueError):  # of what is no number
            yield float(value)  # of "nan" and "inf" too


def _format_samples(samples: Samples) -> str:
    """Return samples as Markdown, each in a block of code."""
    blocks = [textwrap.indent("".join(sample), "    ", lambda line: True) for sample in samples]
    return "\n\n---\n\n".join(blocks)


def import_tracker(name: str) -> Any:
    """Import the package of a tracker. **Raises** `ImportError` with the command that installs it."""
    return import_optional(PACKAGES[name], f"pip install {PACKAGES[name]}")
