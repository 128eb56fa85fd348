"""The results of a finished run: its last lines on the terminal, and `results.json`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo._files import write_json
from zoo._terminal import show
from zoo.parallel import Mesh
from zoo.parallel.module import count

from .summary import summary


def write_results(
    directory: Path,
    model: Any,
    mesh: Mesh,
    *,
    steps: int,
    unit: str = "bits per byte",
    before: Mapping[str, float] | None = None,
    samples: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Write `results.json` into the folder of a run, print its result after the samples of the first prompt, and return
    what was written.

    - `before`: an evaluation before training, `{name: value}`, in `unit`. Without it only "validation" is reported.

    **Raises** `KeyError` if a metric of `before`, or "validation" without it, was not logged.
    """
    last = summary(directory)
    if before:
        values = {name: [start, last[name]] for name, start in before.items()}
    else:
        values = {}
    values = values or {"validation": [last["validation"]]}
    figures = {name: " → ".join(f"{value:.3f}" for value in pair) for name, pair in values.items()}
    result = f"{', '.join(map(' '.join, figures.items()))} {unit} after {steps:,} steps on {mesh}"
    results = {"result": result, "figures": figures, "parameters": count(model), "metrics": last, "samples": samples}
    write_json(directory / "results.json", results)
    shown = ["".join(sample).rstrip() for sample in samples if sample[0] == samples[0][0]]
    if before and len(shown) == 2:
        shown = [f"{label}:\n{text}" for label, text in zip(("before", "after"), shown, strict=True)]
    separator = "\n\n" if shown else "\n"
    show(separator.join(["", *shown, result]))
    return results
