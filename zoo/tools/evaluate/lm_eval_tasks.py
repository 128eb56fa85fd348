"""Tasks of lm_eval: find them by name, evaluate a model on them, read the results."""

import contextlib
import difflib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo._optional import import_optional

from .language_model import LanguageModel
from .lm_eval import INSTALL, ZooLM
from .results import Metric, TaskResult
from .run_tasks import TaskOptions

_evaluator = import_optional("lm_eval.evaluator", INSTALL)
_tasks = import_optional("lm_eval.tasks", INSTALL)

_BOOTSTRAPS = 1000
"""Resamplings of metrics without a formula for their standard error, which is then within 3% of that of many more."""
_RECORD_KEYS = ("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter")


def find_lm_eval_tasks(names: Sequence[str], include_path: Path | None = None) -> Any:
    """Return the `TaskManager` of lm_eval that knows the tasks. `include_path` is a folder of further YAML files.

    **Raises** `ValueError` for a task that it does not know, with the nearest ones; `FileNotFoundError` for a missing
    folder.
    """
    if include_path is not None and not include_path.is_dir():
        raise FileNotFoundError(f"{include_path}: expected a folder of YAML files of tasks")
    manager = _tasks.TaskManager(include_path=None if include_path is None else str(include_path))
    for name in names:
        if not manager.match_tasks([name]):
            nearest = ", ".join(difflib.get_close_matches(name, manager.all_tasks, 3)) or "none is near"
            raise ValueError(
                f"lm_eval has no task {name!r} ({nearest}): `lm_eval ls tasks` lists all, and --include-path adds a "
                "folder of YAML files"
            )
    return manager


def run_lm_eval(
    lm: LanguageModel,
    names: Sequence[str],
    options: TaskOptions,
    *,
    manager: Any,
    shots: int | None = None,
) -> Iterator[list[TaskResult]]:
    """Yield the results of each name, a task or a group of tasks, by lm_eval's `simple_evaluate`.

    - `manager`: as `find_lm_eval_tasks` returns it.
    - `shots`: None for each task's own number.

    Standard errors are those that lm_eval gives: by formula for means, for some other metrics by bootstrap over items,
    and for the rest none.
    """
    model = ZooLM(lm=lm, max_gen_toks=options.max_new_tokens)
    for name in names:
        with _without_pools(), contextlib.redirect_stdout(sys.stderr):
            found = _evaluator.simple_evaluate(
                model=model,
                tasks=manager.match_tasks([name]),
                num_fewshot=shots,
                limit=options.limit,
                bootstrap_iters=_BOOTSTRAPS,
                apply_chat_template=options.chat,
                task_manager=manager,
                log_samples=True,
            )
        yield _read_results(found)


@contextlib.contextmanager
def _without_pools() -> Iterator[None]:
    """Keep lm_eval from forking processes for its bootstrap, which deadlock where JAX has run."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


def _read_results(found: Mapping[str, Any]) -> list[TaskResult]:
    results = []
    for name, values in found["results"].items():
        metrics = {}
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            error = values.get(f"{metric}_stderr,{filtered}")
            if isinstance(error, str):  # lm_eval's "N/A"
                error = None
            if error is not None:
                error = float(error)
            title = metric if filtered == "none" else f"{metric} ({filtered})"
            metrics[title] = Metric(float(value), error)
        records = [_read_record(sample) for sample in found["samples"].get(name, ())]
        version = found["versions"].get(name)
        results.append(
            TaskResult(
                name,
                _count_items(found, name),
                found["n-shot"].get(name, 0),
                metrics,
                records,
                None if version is None else str(version),
            )
        )
    return results


def _count_items(found: Mapping[str, Any], name: str) -> int:
    """Return the number of items of a task, or of all tasks of a group."""
    counts = found["n-samples"].get(name)
    if counts is not None:
        return counts["effective"]
    return sum(_count_items(found, child) for child in found["group_subtasks"].get(name, ()))


def _read_record(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was asked and answered, and the metrics of an item."""
    names = [*_RECORD_KEYS, *sample.get("metrics", ())]
    return {name: sample[name] for name in names if name in sample}
