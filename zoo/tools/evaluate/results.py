"""Results of an evaluation: means with standard errors, a table, and results.json."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo._files import write_json
from zoo._terminal import align_columns

RESULTS_FILE = "results.json"


@dataclasses.dataclass(frozen=True)
class Metric:
    """A mean over items."""

    value: float
    standard_error: float | None
    """Standard error of the mean; None where it is not known."""


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """The metrics of a task, and what the model answered to each item."""

    name: str
    items: int
    shots: int
    metrics: Mapping[str, Metric]
    records: Sequence[Mapping[str, Any]]
    version: str | None = None
    """Version of a task of lm_eval."""


def average(values: Sequence[float]) -> Metric:
    """Return the mean of values and its standard error, s / sqrt(n), where s² is the sample variance with n - 1.

    For correct and wrong answers this is what a bootstrap over items tends to, without its randomness. One item has no
    standard error.
    """
    count = len(values)
    mean = sum(values) / count
    if count == 1:
        return Metric(mean, None)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return Metric(mean, math.sqrt(variance / count))


def format_table(results: Sequence[TaskResult]) -> str:
    """Return a table of tasks and metrics, one metric a line."""
    rows = [["task", "items", "shots", "metric", "value", "standard error"]]
    for result in results:
        cells = [result.name, f"{result.items:,}", str(result.shots)]
        for name, metric in result.metrics.items():
            error = "" if metric.standard_error is None else f"{metric.standard_error:.4f}"
            rows.append([*cells, name, f"{metric.value:.4f}", error])
            cells = ["", "", ""]
    return "\n".join(align_columns(rows, right=(1, 2, 4, 5)))


def summarize_results(results: Sequence[TaskResult]) -> dict[str, Any]:
    """Return the metrics of tasks as JSON, without the items."""
    tasks = {}
    for result in results:
        metrics = {name: dataclasses.asdict(metric) for name, metric in result.metrics.items()}
        tasks[result.name] = {"items": result.items, "shots": result.shots, "metrics": metrics}
        if result.version is not None:
            tasks[result.name]["version"] = result.version
    return tasks


def write_results(directory: Path, results: Sequence[TaskResult], facts: Mapping[str, Any]) -> None:
    """Write `results.json`: `facts` of the model, the versions and the options, the metrics, and every item."""
    items = {result.name: result.records for result in results}
    write_json(directory / RESULTS_FILE, {**facts, "tasks": summarize_results(results), "items": items})
