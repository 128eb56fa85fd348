"""Scatter plots with a logarithmic x axis, as inline SVG: cost against quality."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .chart import (
    LEGEND_LINE_HEIGHT,
    NUM_COLORS,
    Frame,
    draw_y_grid,
    estimate_text_width,
    svg_text,
    wrap_legend,
    wrap_svg,
)

_MARKER_RADIUS = 4.5
MARKER_SHAPES = ("circle", "square", "triangle")
"""Marker shapes of the first eight series, the next eight, and so on, since there are eight colors."""


@dataclass(frozen=True)
class ScatterSeries:
    """A series of points, connected in order by a line."""

    label: str
    x: Sequence[float | int]
    values: Sequence[float | int]


def group_series(rows: Sequence[Mapping[str, Any]], label: str, *, x: str, values: str) -> list[ScatterSeries]:
    """Group the rows of a table into series, one per entry of column `label`, of the columns `x` and `values`."""
    groups = {row[label]: [other for other in rows if other[label] == row[label]] for row in rows}
    return [ScatterSeries(name, [r[x] for r in group], [r[values] for r in group]) for name, group in groups.items()]


def draw_scatter(
    series: Sequence[ScatterSeries], *, unit: str, x_label: str, width: int = 860, height: int = 400
) -> str:
    """Draw the values of each series, in `unit`, over a logarithmic x axis, as an `<svg>` element.

    Skips values that are not finite. The y axis starts at 0. **Raises** `ValueError` for an x that is not positive.
    """
    if any(x <= 0 for group in series for x in group.x):
        raise ValueError(f"{x_label}: a logarithmic axis takes positive numbers only")
    by_series = [[(math.log2(x), y) for x, y in zip(g.x, g.values, strict=True) if math.isfinite(y)] for g in series]
    everything = [point for points in by_series for point in points]
    if not everything:
        return "<p>Nothing was measured.</p>"
    rows = wrap_legend(unit, [group.label for group in series], width)
    powers = (math.floor(min(x for x, _ in everything) - 0.2), math.ceil(max(x for x, _ in everything) + 0.2))
    high = 1.06 * (max(y for _, y in everything) or 1.0)
    span, top = (float(powers[0]), float(powers[1])), 14.0 + LEGEND_LINE_HEIGHT * len(rows)
    frame = Frame(span, (0.0, high), left=52.0, top=top, right=width - 14.0, bottom=height - 44.0)
    parts = [*draw_y_grid(frame, unit), *_draw_log_axis(frame, powers, x_label)]
    for number, (group, points) in enumerate(zip(series, by_series, strict=True)):
        color = f"curve{number % NUM_COLORS}"
        if len(points) > 1:
            parts.append(f'<path class="line {color}" d="{frame.path(*zip(*points, strict=True))}"/>')
        for x, y in points:
            tooltip = f"{group.label}: {y:.4g} at {2**x:,.0f}"
            parts.append(_draw_marker(number, frame.x_pixel(x), frame.y_pixel(y), tooltip))
    return wrap_svg([*parts, *_draw_marker_legend(frame, rows)], f"{unit} against {x_label}", width, height)


def _draw_log_axis(frame: Frame, powers: tuple[int, int], x_label: str) -> list[str]:
    """Draw ticks at powers of two, as many as fit, with binary prefixes: 512, 1Ki, 2Ki."""
    stride = math.ceil((powers[1] - powers[0] + 1) / ((frame.right - frame.left) / 55))
    parts = []
    for power in range(powers[0], powers[1] + 1, stride):
        label = f"{2 ** (power % 10):g}{('', 'Ki', 'Mi', 'Gi', 'Ti')[power // 10]}" if power >= 0 else f"{2**power:g}"
        parts.append(f'<path class="axis" d="M{frame.x_pixel(power):.1f},{frame.bottom:g}v5"/>')
        parts.append(svg_text(frame.x_pixel(power), frame.bottom + 20, label, "middle"))
    parts.append(f'<path class="axis" d="M{frame.left},{frame.bottom:g}H{frame.right}"/>')
    parts.append(svg_text((frame.left + frame.right) / 2, frame.bottom + 38, x_label, "middle"))
    return parts


def _draw_marker(number: int, x: float, y: float, tooltip: str = "") -> str:
    """Draw a marker in the color and shape of series `number`."""
    title = f"<title>{html.escape(tooltip)}</title>" if tooltip else ""
    shape, r = MARKER_SHAPES[number // NUM_COLORS % len(MARKER_SHAPES)], _MARKER_RADIUS
    path = {
        "circle": f"M{x - r:.1f},{y:.1f}a{r},{r} 0 1 0 {2 * r},0a{r},{r} 0 1 0 {-2 * r},0z",
        "square": f"M{x - r:.1f},{y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}z",
        "triangle": f"M{x:.1f},{y - 1.2 * r:.1f}l{1.2 * r:.1f},{2.1 * r:.1f}h{-2.4 * r:.1f}z",
    }[shape]
    return f'<path class="dot curve{number % NUM_COLORS}" d="{path}">{title}</path>'


def _draw_marker_legend(frame: Frame, rows: Sequence[Sequence[tuple[int, str]]]) -> list[str]:
    """Draw the labels in the top margin, each with its marker."""
    parts = []
    for line, row in enumerate(rows):
        x, y = frame.right, 16.0 + LEGEND_LINE_HEIGHT * line
        for number, label in reversed(row):
            x -= estimate_text_width(label) + 28
            parts.append(_draw_marker(number, x + 14, y - 4))
            parts.append(svg_text(x + 26, y, label, "start"))
            x -= 18
    return parts
