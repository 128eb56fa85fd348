"""Reports on one run, and on several."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jaxtyping import Array, Key, PyTree

from zoo._files import read_json
from zoo._terminal import show
from zoo.train.checkpoint import Best
from zoo.train.options import find_run_options, flatten_config
from zoo.train.run import Run
from zoo.train.samples import HeldOutPrompt

from .page import write_report
from .parameters import describe_model, tabulate_parameters


def report_run(
    run: Run,
    title: str,
    model: Any,
    *,
    before: Mapping[str, float] | None = None,
    headline: Mapping[str, str] | None = None,
    prompts: Sequence[str | HeldOutPrompt] = (),
    key: Key[Array, ""] | None = None,
    samples: Sequence[tuple[str, str]] = (),
    export_seq_len: int | None = None,
    parameters: PyTree = None,
    unit: str | None = None,
    curves: Mapping[str, str] | None = None,
    **sections: Any,
) -> None:
    """Finish a run (`zoo.train.Run.finish`), write `report.html` into its folder, and then export the model if asked.

    - `before`, `prompts`, `key`, `samples`, `export_seq_len`, `unit`: arguments of `Run.finish`.
    - `headline`: further figures, label to text.
    - `parameters`: the tree to tabulate, by default `model`.
    - `curves`: names and labels of the metrics in the first chart, by default the training loss and those of `before`.
    - `sections`: further arguments of `write_report`.

    Mesh and data are the run's. Values that differ from the defaults of its configuration come first. Call it in every
    process after the `with` block; only the first one writes. A run that was stopped writes nothing.
    """
    if run.stopped:
        return
    try:
        run.finish(model, before=before, prompts=prompts, key=key, samples=samples, unit=unit)
    finally:  # also of a model that trains, and cannot decode yet
        if jax.process_index() == 0 and (run.directory / "results.json").exists():
            results = read_json(run.directory / "results.json")
            figures = results["figures"]
            tabulated = model if parameters is None else parameters
            earlier, later = _split_samples(results["samples"], is_compared=before is not None)
            if unit is None:
                sections = {"baselines": run.data.baselines, **sections}
            path = write_report(
                run.directory,
                title=title,
                model=describe_model(model),
                summary=results["result"],
                curves=curves or {run.data.metric: "training", **{name: name for name in figures}},
                unit=unit or run.data.unit,
                best=run.best,
                headline={**figures, "parameters": f"{results['parameters']:,}", **(headline or {})},
                samples=later,
                samples_before=earlier,
                parameters=tabulate_parameters(tabulated, run.mesh),
                defaults=_list_defaults(run.recipe),
                **sections,
            )
            show(f"wrote the report to {path}")
    if export_seq_len is not None:
        run.export(model, seq_len=export_seq_len)


def report_runs(
    config: Any,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    description: str,
    curves: Mapping[str, str] = MappingProxyType({"validation": "validation"}),
    unit: str = "bits per byte",
    best: Best | None = "lowest",
    **sections: Any,
) -> None:
    """Write `report.html` on the runs in subdirectories of one folder, and print its table.

    - `config`: the recipe's configuration, with `RunOptions` that name the folder; or only the folder. Values that
      differ from its defaults come first.
    - `rows`: the table, one row per run; "run" names its subdirectory.
    - `description`: the line below the title.
    - `curves`, `unit`, `best`, `sections`: arguments of `write_report`; by default the runs' "validation" in bits per
      byte.

    Only the first process writes.
    """
    if jax.process_index() != 0:
        return
    directory = find_run_options(config).out
    runs = {row["run"]: directory / row["run"] for row in rows}
    tables = {"Results": rows, **sections.pop("tables", {})}
    path = write_report(
        directory,
        title=title,
        summary=description,
        curves=curves,
        unit=unit,
        best=best,
        runs=runs,
        tables=tables,
        defaults=_list_defaults(config),
        **sections,
    )
    cells = [list(rows[0]), *([_format_number(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    show()
    for line in cells:
        show("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    show(f"\nwrote the report to {path}")


def _split_samples(samples: Sequence[Sequence[str]], *, is_compared: bool) -> tuple[Sequence, Sequence]:
    """Return the samples before training and those after it, of the same prompts; none before if it was not sampled."""
    half = len(samples) // 2
    if is_compared and [prompt for prompt, _ in samples[:half]] == [prompt for prompt, _ in samples[half:]]:
        return samples[:half], samples[half:]
    return [], samples


def _list_defaults(config: Any) -> dict[str, Any] | None:
    """Return the defaults of a configuration as `config.json` names them."""
    if not dataclasses.is_dataclass(config):
        return None
    return flatten_config(type(config)())


def _format_number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
