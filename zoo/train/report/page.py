"""HTML report of one or several runs: a single file without scripts or external resources, light or dark.

    write_report(out, title="Transformer", summary="...", curves={"bits_per_byte": "train", "validation": "validation"},
                 baselines={"xz -9e": corpus.xz_bits_per_byte}, unit="bits per byte", samples=[(prompt, continuation)])

It reads only files of the run's folder, so it can be written again at any time.
"""

import dataclasses
import html
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zoo._files import read_json, write_text

from ..metrics import Record, read_metrics
from ..progress import RATE_FORMATS, format_duration, format_si
from .chart import LEGEND_LINE_HEIGHT, Curve, draw_line_chart, wrap_legend
from .heatmap import Heatmap, draw_heatmaps
from .style import STYLE

_WIDE = {"width": 860, "height": 400}
_NARROW = {"width": 400, "height": 320}
_SMALL_WIDTH, _SMALL_HEIGHT = 400, 220
_NUMBER_CLASS = ' class="number"'


class ParameterRow(NamedTuple):
    """A row of the parameter table."""

    name: str
    shape: str
    dims: str
    layout: str
    dtype: str
    count: int
    bytes: int


def write_report(
    directory: Path,
    *,
    title: str,
    summary: str,
    curves: Mapping[str, str],
    unit: str,
    baselines: Mapping[str, float | int] | None = None,
    headline: Mapping[str, str] | None = None,
    samples: Sequence[tuple[str, str]] = (),
    parameters: Sequence[tuple] = (),
    runs: Mapping[str, Path] | None = None,
    tokens_per_step: int = 0,
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    heatmaps: Mapping[str, str] | None = None,
    plots: Mapping[str, Callable[..., str]] | None = None,
) -> Path:
    """Write `report.html` into a run's folder, from its metrics, timing, configuration and environment.

    - `summary`: the result in one line.
    - `curves`: names of metrics and their labels, all in `unit`. Metrics logged at most steps are smoothed, others are
      dots. `baselines`: horizontal lines across the chart. The metrics "gradient_norm" and "learning_rate" have small
      charts of their own where they are logged; of a sweep, the median of its runs.
    - `headline`: the key figures, shown large at the top.
    - `samples`: prompts and continuations; `parameters`: rows like `ParameterRow`.
    - `runs`: labels and folders of several runs to compare, one curve each. Configuration and environment are shown for
      the first.
    - `tokens_per_step`: draw curves over tokens instead of steps.
    - `tables`: titles and rows, each row a mapping from column heads to values.
    - `heatmaps`: names of metrics that are counts "groups rows", and titles: their balance over time.
    - `plots`: titles and functions that draw an SVG, called with `width=` and `height=`, such as
      `functools.partial(draw_scatter, ...)`.
    """
    directory = Path(directory)
    folders = {label: Path(folder) for label, folder in (runs or {"": directory}).items()}
    metrics = {label: read_metrics(folder / "metrics.jsonl") for label, folder in folders.items()}
    first, *others = folders.values()
    timing = [] if others else read_metrics(first / "timing.jsonl")
    speed = {} if others else _summarize_speed(next(iter(metrics.values())), timing)
    lines = _make_curves(metrics, curves, tokens_per_step)
    x_label = "tokens" if tokens_per_step else "steps"
    draw_chart = partial(draw_line_chart, lines, baselines or {}, unit=unit, x_label=x_label)
    sections = [
        f"<header><h1>{_escape(title)}</h1><p>{_escape(summary)}</p></header>",
        _format_headline({**(headline or {}), **speed}),
        f"<section>{_draw_both_sizes(draw_chart)}</section>" if curves else "",
        _draw_optimization(metrics, tokens_per_step),
        *(_format_section(title, _draw_both_sizes(draw)) for title, draw in (plots or {}).items()),
        *(_format_section(title, _format_table(rows)) for title, rows in (tables or {}).items()),
        *(
            _format_section(title, _draw_metric_heatmaps(metrics, name, title, tokens_per_step))
            for name, title in (heatmaps or {}).items()
        ),
        _format_section("Samples", "".join(map(_format_sample, samples))),
        _format_section("Configuration", _format_pairs(_read_json_if_present(first / "config.json"))),
        _format_section("Parameters", _format_parameters([ParameterRow._make(row) for row in parameters])),
        _format_section("Timing", _format_pairs(_summarize_timing(timing))),
        _format_section("Environment", _format_pairs(_read_json_if_present(first / "env.json"))),
    ]
    path = directory / "report.html"
    write_text(path, _format_page(title, "\n".join(section for section in sections if section)))
    return path


def _make_curves(
    metrics: Mapping[str, Sequence[Record]], names: Mapping[str, str], tokens_per_step: int
) -> list[Curve]:
    """Return a curve for each of the named metrics of each run, labeled by run, metric, or both if there are several of
    each."""
    curves = []
    for run, lines in metrics.items():
        for name, label in names.items():
            points = [(line["step"] * (tokens_per_step or 1), _to_number(line[name])) for line in lines if name in line]
            label = label if not run else run if len(names) == 1 else f"{run}, {label}"
            smooth = len(points) > max(20, 0.5 * len(lines))
            curves.append(Curve(label, [x for x, _ in points], [value for _, value in points], smooth=smooth))
    return curves


def _to_number(value: Any) -> float:
    """Convert a logged value; of several, take the median."""
    return float(np.median([float(item) for item in value]) if isinstance(value, list) else value)


def _draw_optimization(metrics: Mapping[str, Sequence[Record]], tokens_per_step: int) -> str:
    """Draw gradient norms, on a logarithmic axis, and learning rates beside each other, those that were logged."""
    x_label, charts = "tokens" if tokens_per_step else "steps", []
    for name, log in (("gradient_norm", True), ("learning_rate", False)):
        swept = any(isinstance(line.get(name), list) for lines in metrics.values() for line in lines)
        unit = name.replace("_", " ") + (", median" if swept else "")
        curves = [curve for curve in _make_curves(metrics, {name: unit}, tokens_per_step) if curve.values]
        if name == "learning_rate":  # a schedule has no noise to smooth
            curves = [dataclasses.replace(curve, smooth=False, dots=False) for curve in curves]
        if len(curves) == 1:
            curves = [dataclasses.replace(curves[0], label="")]  # the unit says it
        if curves:
            lines = len(wrap_legend(unit, [curve.label for curve in curves], _SMALL_WIDTH)) - 1
            size = {"width": _SMALL_WIDTH, "height": _SMALL_HEIGHT + round(LEGEND_LINE_HEIGHT * lines)}
            charts.append(f"<div>{draw_line_chart(curves, {}, unit=unit, x_label=x_label, log=log, **size)}</div>")
    return f'<section class="pair">{"".join(charts)}</section>' if charts else ""


def _draw_both_sizes(draw: Callable[..., str]) -> str:
    """Draw a wide and a narrow picture; the style sheet shows the one that fits."""
    return f'<div class="wide">{draw(**_WIDE)}</div><div class="narrow">{draw(**_NARROW)}</div>'


def _draw_metric_heatmaps(runs: Mapping[str, Sequence[Record]], name: str, title: str, tokens_per_step: int) -> str:
    found = {label: [line for line in lines if name in line] for label, lines in runs.items()}
    panels = [
        Heatmap(
            label,
            [line["step"] * (tokens_per_step or 1) for line in lines],
            np.array([line[name] for line in lines], float),
        )
        for label, lines in found.items()
        if lines
    ]
    x_label = "tokens" if tokens_per_step else "steps"
    return _draw_both_sizes(
        lambda width, **_: draw_heatmaps(panels, unit="multiple of an even share", x_label=x_label, width=width)
    )


def _summarize_speed(metrics: Sequence[Record], timing: Sequence[Record]) -> dict[str, str]:
    rates = {"steps": f"{metrics[-1]['step']:,}"} if metrics else {}
    for name, write in RATE_FORMATS.items():
        if values := [line[name] for line in timing if name in line]:
            number, unit = write(statistics.median(values)).split(" ")
            rates[unit] = number
    return rates


def _summarize_timing(timing: Sequence[Record]) -> dict[str, str]:
    if not timing:
        return {}
    # Seconds restart at 0 whenever the run is resumed.
    seconds = [line["seconds"] for line in timing]
    ends = [a for a, b in zip(seconds, [*seconds[1:], 0.0], strict=True) if b < a]
    rows = {
        "time in all": format_duration(sum(ends)),
        "starts": str(len(ends)),
        f"until the end of step {timing[0]['step']}, compilation included": f"{seconds[0]:.1f} s",
    }
    for name in ("steps_per_second", "tokens_per_second", "flops_per_second"):
        if values := [line[name] for line in timing if name in line]:
            low, middle, high = (format_si(pick(values)) for pick in (min, statistics.median, max))
            rows[name.replace("_", " ")] = f"{middle} (median), {low} to {high}"
    return rows


def _format_parameters(rows: Sequence[ParameterRow]) -> str:
    """Format the parameter table, with dims and sharding below the names: as columns they would not fit."""
    if not rows:
        return ""
    body = ""
    for row in rows:
        below = "; ".join(filter(None, (row.dims, row.layout)))
        cells = f"<td>{_escape(row.name)}<br/><small>{_escape(below)}</small></td>"
        cells += "".join(_format_cell(value, isinstance(value, int)) for value in (row.shape, row.dtype, *row[-2:]))
        body += f"<tr>{cells}</tr>"
    count, size = (_format_cell(sum(numbers), True) for numbers in zip(*(row[-2:] for row in rows), strict=True))
    head = "<th>name, dims, layout</th><th>shape</th><th>dtype</th><th{0}>count</th><th{0}>bytes</th>"
    total = f'<tr class="total"><td>total</td><td></td><td></td>{count}{size}</tr>'
    return _format_scrolling_table(head.format(_NUMBER_CLASS), body + total, "parameters")


def _format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows with the same columns as a table; numbers are right-aligned."""
    if not rows:
        return ""
    numeric = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    head = "".join(f"<th{_NUMBER_CLASS if name in numeric else ''}>{_escape(name)}</th>" for name in rows[0])
    cells = [[_format_cell(value, name in numeric) for name, value in row.items()] for row in rows]
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return _format_scrolling_table(head, body, "results")


def _format_scrolling_table(head: str, body: str, name: str) -> str:
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll" tabindex="0"><table class="{name}">{head}<tbody>{body}</tbody></table></div>'


def _format_cell(value: Any, numeric: bool) -> str:
    written = (
        f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if isinstance(value, float) else _escape(value)
    )
    return f"<td{_NUMBER_CLASS if numeric else ''}>{written}</td>"


def _format_pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{_escape(name)}</th><td>{_escape(_format_setting(value))}</td></tr>" for name, value in values.items()
    )
    return _format_scrolling_table("", rows, "pairs") if rows else ""


def _format_setting(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_format_setting(item)}" for name, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return " ".join(map(_format_setting, value)) or "none"
    return "none" if value is None else str(value)


def _format_headline(headline: Mapping[str, str]) -> str:
    items = "".join(f"<div><dt>{_escape(name)}</dt><dd>{_escape(text)}</dd></div>" for name, text in headline.items())
    return f"<dl>{items}</dl>" if items else ""


def _format_sample(sample: tuple[str, str]) -> str:
    prompt, continuation = sample
    return f"<pre><b>{_escape(prompt)}</b>{_escape(continuation.rstrip())}</pre>"


def _format_section(title: str, content: str) -> str:
    return f"<section><h2>{_escape(title)}</h2>{content}</section>" if content else ""


def _escape(value: Any) -> str:
    """Escape text for HTML. Control characters, which an untrained model samples, become their Unicode pictures."""
    text = "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in str(value))
    return html.escape(text.replace("\x7f", "\u2421"))


def _read_json_if_present(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _format_page(title: str, body: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{_escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
