"""Report of one run at its end: the result in a line, from metrics in bits per byte."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from zoo._terminal import show
from zoo.parallel import Mesh, count
from zoo.text.corpus import Corpus

from ..summary import summary
from .page import write_report
from .parameters import tabulate_parameters


def report_result(
    directory: Path,
    title: str,
    model: Any,
    mesh: Mesh,
    corpus: Corpus,
    *,
    steps: int,
    before: Mapping[str, float] | None = None,
    headline: Mapping[str, str] | None = None,
    samples: Sequence[tuple[str, str]] = (),
    parameters: PyTree = None,
    **sections: Any,
) -> None:
    """Write `report.html` on the run in `directory`, and print its result, after the samples of the first prompt.

    The arguments are those of `Run.report`. **Raises** `KeyError` if a metric of `before`, or "validation" without it,
    was not logged.
    """
    last = summary(directory)
    values = {name: (start, last[name]) for name, start in before.items()} if before else {}
    values = values or {"validation": (last["validation"],)}
    figures = {name: " → ".join(f"{value:.3f}" for value in pair) for name, pair in values.items()}
    result = f"{', '.join(map(' '.join, figures.items()))} bits per byte after {steps:,} steps on {mesh}"
    path = write_report(
        directory,
        title=title,
        summary=result,
        curves={"bits_per_byte": "training", **{name: name for name in values}},
        baselines={"xz -9e": corpus.xz_bits_per_byte},
        unit="bits per byte",
        headline={**figures, "parameters": f"{count(model):,}", **(headline or {})},
        samples=samples,
        parameters=tabulate_parameters(model if parameters is None else parameters, mesh),
        **sections,
    )
    shown = ["".join(sample).rstrip() for sample in samples if sample[0] == samples[0][0]]
    show(("\n\n" if shown else "\n").join(["", *shown, result]))
    show(f"wrote the report to {path}")
