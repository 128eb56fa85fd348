"""One page about a run, in one file: no scripts, nothing fetched, light or dark as the reader likes.

    write_report(out, title="Transformer", summary="...", curves={"bits_per_byte": "train", "validation": "validation"},
                 floors={"xz -9e": corpus.xz}, unit="bits per byte", samples=[(prompt, continuation)])

It is made from what the run wrote into its folder, so it can be made again at any time.
"""

import html
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .chart import Curve, chart
from .files import read_json, write_text
from .metrics import Line, read_lines
from .progress import SPEEDS, clock, scaled
from .style import STYLE


class ParameterRow(NamedTuple):
    """A line of the table of parameters."""

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
    floors: Mapping[str, float | int] | None = None,
    figures: Mapping[str, str] | None = None,
    samples: Sequence[tuple[str, str]] = (),
    parameters: Sequence[tuple] = (),
) -> Path:
    """Write `report.html` into a run's folder, from its metrics, timing, configuration and environment.

    **Arguments:** `summary` is the result in one line. `curves` maps names in the metrics to labels, all in `unit`; the
    ones that were logged at most steps are smoothed, the others are dots. `floors` are lines across the chart.
    `figures` stand large on top, name to text. `samples` are prompts and continuations. `parameters` are rows as
    `ParameterRow` has them.
    """
    directory = Path(directory)
    metrics, timing = read_lines(directory / "metrics.jsonl"), read_lines(directory / "timing.jsonl")
    drawn = [_curve(metrics, name, label) for name, label in curves.items()]
    charts = "".join(
        f'<div class="{name}">{chart(drawn, floors or {}, unit=unit, width=width, height=height)}</div>'
        for name, width, height in (("wide", 860, 400), ("narrow", 400, 320))
    )
    sections = [
        f"<header><h1>{_escape(title)}</h1><p>{_escape(summary)}</p></header>",
        _figures({**(figures or {}), **_speed(metrics, timing)}),
        f"<section>{charts}</section>",
        _section("Samples", "".join(map(_sample, samples))),
        _section("Configuration", _pairs(_json(directory / "config.json"))),
        _section("Parameters", _parameters([ParameterRow._make(row) for row in parameters])),
        _section("Timing", _pairs(_timing(timing))),
        _section("Environment", _pairs(_json(directory / "env.json"))),
    ]
    path = directory / "report.html"
    write_text(path, _page(title, "\n".join(section for section in sections if section)))
    return path


def _curve(metrics: Sequence[Line], name: str, label: str) -> Curve:
    points = [(line["step"], float(line[name])) for line in metrics if name in line]
    smooth = len(points) > max(20, 0.5 * len(metrics))
    return Curve(label, [step for step, _ in points], [value for _, value in points], smooth=smooth)


def _speed(metrics: Sequence[Line], timing: Sequence[Line]) -> dict[str, str]:
    figures = {"steps": f"{metrics[-1]['step']:,}"} if metrics else {}
    for name, write in SPEEDS.items():
        if values := [line[name] for line in timing if name in line]:
            number, unit = write(statistics.median(values)).split(" ")
            figures[unit] = number
    return figures


def _timing(timing: Sequence[Line]) -> dict[str, str]:
    if not timing:
        return {}
    # Each start of the run counts its own seconds: a fall begins another one.
    seconds = [line["seconds"] for line in timing]
    ends = [a for a, b in zip(seconds, [*seconds[1:], 0.0], strict=True) if b < a]
    rows = {
        "time in all": clock(sum(ends)),
        "starts": str(len(ends)),
        f"first {timing[0]['step']} steps, compilation included": f"{seconds[0]:.1f} s",
    }
    for name in ("steps_per_second", "tokens_per_second", "flops_per_second"):
        if values := [line[name] for line in timing if name in line]:
            low, middle, high = (scaled(pick(values)) for pick in (min, statistics.median, max))
            rows[name.replace("_", " ")] = f"{middle} (median), {low} to {high}"
    return rows


def _parameters(rows: Sequence[ParameterRow]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ParameterRow._fields)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    count, size = sum(row.count for row in rows), sum(row.bytes for row in rows)
    total = f'<tr class="total"><td>total</td>{"<td></td>" * 4}{_cell(count)}{_cell(size)}</tr>'
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}{total}</tbody></table></div>'


def _cell(value: Any) -> str:
    return f'<td class="number">{value:,}</td>' if isinstance(value, int) else f"<td>{_escape(value)}</td>"


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{_escape(name)}</th><td>{_escape(_flat(value))}</td></tr>" for name, value in values.items()
    )
    return f'<div class="scroll"><table class="pairs"><tbody>{rows}</tbody></table></div>' if rows else ""


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_flat(item)}" for name, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return " ".join(map(_flat, value)) or "none"
    return "none" if value is None else str(value)


def _figures(figures: Mapping[str, str]) -> str:
    items = "".join(f"<div><dt>{_escape(name)}</dt><dd>{_escape(text)}</dd></div>" for name, text in figures.items())
    return f"<dl>{items}</dl>" if items else ""


def _sample(sample: tuple[str, str]) -> str:
    prompt, continuation = sample
    return f"<pre><b>{_escape(prompt)}</b>{_escape(continuation)}</pre>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _escape(value: Any) -> str:
    """Text for the page; control characters, which a young model writes, by their pictures."""
    text = "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in str(value))
    return html.escape(text.replace("\x7f", "\u2421"))


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _page(title: str, body: str) -> str:
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
