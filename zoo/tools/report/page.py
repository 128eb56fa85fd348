"""HTML report of one or several runs: a single file without scripts or external resources, light or dark.

write_report(out, title="Transformer", summary="...", curves={"bits_per_byte": "train", "validation": "validation"},
             baselines={"xz -9e": corpus.xz_bits_per_byte}, unit="bits per byte", samples=[(prompt, continuation)])
"""

import dataclasses
import html
import importlib.util
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zoo._files import read_json, to_jsonable, write_text
from zoo._terminal import escape_controls
from zoo.train.checkpoint import Best
from zoo.train.metrics import Record, read_metrics
from zoo.train.progress import RATE_FORMATS, format_duration, format_si
from zoo.train.tracking import track_report

from .._figure import INSTALL
from .charts import Chart, Curve, LineChart

_WIDE = 860
_NARROW = 400
_NUMBER_CLASS = ' class="number"'
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""The Unicode picture of each control character."""
_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


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
    model: str = "",
    baselines: Mapping[str, float | int] | None = None,
    headline: Mapping[str, str] | None = None,
    samples: Sequence[Sequence[str]] = (),
    samples_before: Sequence[Sequence[str]] = (),
    parameters: Sequence[tuple] = (),
    runs: Mapping[str, Path] | None = None,
    best: Best | None = None,
    tokens_per_step: int = 0,
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    loads: Mapping[str, str] | None = None,
    plots: Mapping[str, Chart] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Path:
    """Write `report.html` into a run's folder, from its metrics, timing, configuration and environment, and give it to
    the run's trackers.

    Charts need matplotlib, the extra `tools`. Without it the page has tables, and a line that says so.

    - `summary`: the result in one line; `model`: the trained model in one line, above it.
    - `curves`: names of metrics and their labels, all in `unit`. Metrics logged at most steps are smoothed, others are
      dots. `baselines`: horizontal lines across the chart. The metrics "gradient_norm" and "learning_rate" have small
      charts of their own where they are logged; of a sweep, the median of its runs.
    - `headline`: the key figures, shown large at the top.
    - `samples`: prompts and continuations; `samples_before`: those of the same prompts before training, shown next to
      them. `parameters`: rows like `ParameterRow`.
    - `runs`: labels and folders of several runs to compare, one curve each. Configuration and environment are shown for
      the first.
    - `best`: the value of the curves that stands between the first and the last in a table; by default both the lowest
      and the highest.
    - `tokens_per_step`: draw curves over tokens instead of steps.
    - `tables`: titles and rows, each row a mapping from column heads to values.
    - `loads`: names of metrics that are counts "layers experts", and titles: the largest load of an expert over time.
    - `plots`: titles and charts.
    - `defaults`: defaults of the configuration; the values that differ come first.
    """
    directory = Path(directory)
    folders = dict(runs or {"": directory})
    metrics = {label: read_metrics(Path(folder) / "metrics.jsonl") for label, folder in folders.items()}
    first, *others = (Path(folder) for folder in folders.values())
    timing = [] if others else read_metrics(first / "timing.jsonl")
    speed = {} if others else _summarize_speed(next(iter(metrics.values())), timing)
    has_charts = importlib.util.find_spec("matplotlib") is not None

    def draw(chart: Chart) -> str:
        """Draw a wide and a narrow picture; the style sheet shows the one that fits."""
        if not has_charts:
            return ""
        wide, narrow = (_draw_inline(chart, width) for width in (_WIDE, _NARROW))
        return f'<figure class="wide">{wide}</figure><figure class="narrow">{narrow}</figure>'

    lines = [line for line in (model, summary) if line]
    if not has_charts:
        lines.append(f"Charts need matplotlib: {INSTALL}")
    paragraphs = "".join(f"<p>{_escape(line)}</p>" for line in lines)
    x_label = "tokens" if tokens_per_step else "steps"
    drawn = _make_curves(metrics, curves, tokens_per_step)
    main = ""
    if drawn:
        main = draw(LineChart(drawn, unit, x_label, baselines or {}))
        main = main or _format_table(_tabulate_curves(drawn, baselines or {}, best))
    small = ""
    if has_charts:
        charts = _make_optimization_charts(metrics, tokens_per_step, x_label)
        small = "".join(f"<figure>{_draw_inline(chart, _NARROW)}</figure>" for chart in charts)
    sections = [(name, draw(chart)) for name, chart in (plots or {}).items()]
    sections += [(name, _format_table(rows)) for name, rows in (tables or {}).items()]
    for metric, name in (loads or {}).items():
        largest = _make_load_curves(metrics, metric, tokens_per_step)
        sections.append((name, draw(LineChart(largest, "largest load, of an even share", x_label))))
    sections += [
        ("Samples", _format_samples(samples, samples_before)),
        ("Configuration", _format_configuration(_read_json_if_present(first / "config.json"), defaults)),
        ("Parameters", _format_parameters([ParameterRow._make(row) for row in parameters])),
        ("Timing", _format_pairs(_summarize_timing(timing))),
        ("Environment", _format_pairs(_read_json_if_present(first / "env.json"))),
    ]
    parts = [
        f"<header><h1>{_escape(title)}</h1>{paragraphs}</header>",
        _format_headline({**(headline or {}), **speed}),
        f"<section>{main}</section>" if main else "",
        f'<section class="pair">{small}</section>' if small else "",
        *(f"<section><h2>{_escape(name)}</h2>{body}</section>" for name, body in sections if body),
    ]
    path = directory / "report.html"
    write_text(path, _format_page(title, "\n".join(filter(None, parts))))
    track_report(directory, path, [*samples_before, *samples])
    return path


def _draw_inline(chart: Chart, width: int) -> str:
    """Draw a chart as an element of HTML, which needs no namespace."""
    return chart.draw_svg(width=width).replace(' xmlns="http://www.w3.org/2000/svg"', "")


def _make_curves(
    metrics: Mapping[str, Sequence[Record]], names: Mapping[str, str], tokens_per_step: int
) -> list[Curve]:
    """Return a curve for each of the named metrics of each run, labeled by run, metric, or both if there are several of
    each."""
    curves = []
    for run, lines in metrics.items():
        for name, label in names.items():
            logged = [line for line in lines if name in line]
            if run:
                label = run if len(names) == 1 else f"{run}, {label}"
            steps = [line["step"] * (tokens_per_step or 1) for line in logged]
            values = [_to_number(line[name]) for line in logged]
            curves.append(Curve(label, steps, values, smooth=len(logged) > max(20, 0.5 * len(lines))))
    return curves


def _tabulate_curves(
    curves: Sequence[Curve], baselines: Mapping[str, float | int], best: Best | None
) -> list[dict[str, Any]]:
    """Return a row per curve: its first, best and last value."""
    columns = {"first": lambda values: values[0], "lowest": min, "highest": max, "last": lambda values: values[-1]}
    unused = {"lowest", "highest"} - {best} if best else set()
    columns = {name: choose for name, choose in columns.items() if name not in unused}
    rows = [
        {"": curve.label, **{name: choose(curve.values) for name, choose in columns.items()}}
        for curve in curves
        if curve.values
    ]
    empty = dict.fromkeys(columns, "")
    return rows + [{"": label, **empty, "last": float(value)} for label, value in baselines.items()]


def _make_optimization_charts(
    metrics: Mapping[str, Sequence[Record]], tokens_per_step: int, x_label: str
) -> list[LineChart]:
    """Return charts of gradient norms, on a logarithmic axis, and of learning rates, if they were logged."""
    charts = []
    for name in ("gradient_norm", "learning_rate"):
        curves = [curve for curve in _make_curves(metrics, {name: ""}, tokens_per_step) if curve.values]
        if name == "learning_rate":  # a schedule has no noise to smooth
            curves = [dataclasses.replace(curve, smooth=False, dots=False) for curve in curves]
        is_swept = any(isinstance(line.get(name), list) for lines in metrics.values() for line in lines)
        unit = name.replace("_", " ")
        if is_swept:
            unit += ", median"
        if curves:
            charts.append(LineChart(curves, unit, x_label, log=name == "gradient_norm"))
    return charts


def _make_load_curves(metrics: Mapping[str, Sequence[Record]], name: str, tokens_per_step: int) -> list[Curve]:
    """Return a curve for each run, empty if it counted no tokens per expert: the largest load in any layer, as a
    multiple of an even share."""
    curves = []
    for run, lines in metrics.items():
        logged = [line for line in lines if name in line]
        counts = [np.asarray(line[name], float) for line in logged]
        largest = [float((each.max(-1) / np.maximum(each.mean(-1), 1e-9)).max()) for each in counts]
        steps = [line["step"] * (tokens_per_step or 1) for line in logged]
        curves.append(Curve(run, steps, largest, dots=False))
    return curves


def _to_number(value: Any) -> float:
    """Convert a logged value; of several, take the median."""
    if isinstance(value, list):
        value = np.median([float(item) for item in value])
    return float(value)


def _summarize_speed(metrics: Sequence[Record], timing: Sequence[Record]) -> dict[str, str]:
    rates = {}
    if metrics:
        rates["steps"] = f"{metrics[-1]['step']:,}"
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
    head = "".join(_make_cell("th", _escape(name), name in numeric) for name in rows[0])
    cells = [[_format_cell(value, name in numeric) for name, value in row.items()] for row in rows]
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return _format_scrolling_table(head, body, "results")


def _format_scrolling_table(head: str, body: str, name: str) -> str:
    if head:
        head = f"<thead><tr>{head}</tr></thead>"
    return f'<div class="scroll" tabindex="0"><table class="{name}">{head}<tbody>{body}</tbody></table></div>'


def _format_cell(value: Any, numeric: bool) -> str:
    if isinstance(value, float):
        written = f"{value:,.3f}"
    elif isinstance(value, int):
        written = f"{value:,}"
    else:
        written = _escape(value)
    return _make_cell("td", written, numeric)


def _make_cell(tag: str, written: str, numeric: bool) -> str:
    kind = _NUMBER_CLASS if numeric else ""
    return f"<{tag}{kind}>{written}</{tag}>"


def _format_pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{_escape(name)}</th><td>{_escape(_format_setting(value))}</td></tr>" for name, value in values.items()
    )
    if not rows:
        return ""
    return _format_scrolling_table("", rows, "pairs")


def _format_setting(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_format_setting(item)}" for name, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return " ".join(map(_format_setting, value)) or "none"
    return str(value)


def _format_headline(headline: Mapping[str, str]) -> str:
    items = "".join(f"<div><dt>{_escape(name)}</dt><dd>{_escape(text)}</dd></div>" for name, text in headline.items())
    return f"<dl>{items}</dl>" if items else ""


def _format_samples(samples: Sequence[Sequence[str]], before: Sequence[Sequence[str]]) -> str:
    """Format each sample; with those before training, two labeled columns, which a narrow page stacks."""
    if not before:
        return "".join(map(_format_sample, samples))
    rows = []
    for pair in zip(before, samples, strict=True):
        cells = [
            f"<div><small>{label}</small>{_format_sample(sample)}</div>"
            for label, sample in zip(("before", "after"), pair, strict=True)
        ]
        rows.append(f'<div class="pair samples">{"".join(cells)}</div>')
    return "".join(rows)


def _format_sample(sample: Sequence[str]) -> str:
    prompt, continuation = sample
    return f"<pre><b>{_escape(prompt)}</b>{_escape(continuation.rstrip())}</pre>"


def _format_configuration(config: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> str:
    """Format the values that differ from the defaults; the others are folded."""
    if defaults is None:
        return _format_pairs(config)
    written = to_jsonable(defaults)
    changed = {name: value for name, value in config.items() if name not in written or value != written[name]}
    others = {name: value for name, value in config.items() if name not in changed}
    if not others:
        return _format_pairs(changed)
    folded = f"<details><summary>{len(others)} defaults</summary>{_format_pairs(others)}</details>"
    return (_format_pairs(changed) or "<p>Every value is the default.</p>") + folded


def _escape(value: Any) -> str:
    """Escape text for HTML. Control characters, which an untrained model samples, become their Unicode pictures;
    bidirectional controls, which reverse a line or hide in it, become their escapes."""
    text = str(value).translate(_CONTROL_PICTURES)
    return html.escape(escape_controls(text, keep="\n\t"))


def _read_json_if_present(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return read_json(path)


def _format_page(title: str, body: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{_escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
