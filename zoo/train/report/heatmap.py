"""Heatmaps of load balance over time, as inline SVG: one row per expert, colored by its load relative to the mean."""

import html
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from .chart import Frame, draw_x_axis, estimate_text_width, svg_text, wrap_svg

_LEVEL_EDGES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
LEVELS = ("less3", "less2", "less1", "even", "more1", "more2", "more3")
"""CSS classes of the levels, from below the first edge to above the last."""
_MAX_GROUPS = 8
_LEFT, _TITLE, _GAP = 70.0, 34.0, 6.0


@dataclass(frozen=True)
class Heatmap:
    """Counts per row within groups, over steps or tokens: tokens per expert within layers, for example."""

    label: str
    x: Sequence[int]
    counts: Float[np.ndarray, "times groups rows"]


def draw_heatmaps(
    heatmaps: Sequence[Heatmap],
    *,
    unit: str,
    x_label: str = "steps",
    group: str = "layer",
    row: str = "expert",
    width: int = 860,
) -> str:
    """Draw the heatmaps below one another, with one stripe per row of each group, as an `<svg>` element.

    Counts are divided by the mean of their group, so 1 is perfect balance. Shows at most eight groups, including the
    first and the last, and averages neighboring points in time. CSS classes: `even`, `less1` to `less3`, `more1` to
    `more3`.
    """
    heatmaps = [heatmap for heatmap in heatmaps if heatmap.counts.size]
    if not heatmaps:
        return "<p>No metrics were logged.</p>"
    left, right = _LEFT, width - 14.0
    last = float(max(heatmap.x[-1] for heatmap in heatmaps))
    legend, bottom = _draw_level_legend(unit, width)
    parts = list(legend)
    for heatmap in heatmaps:
        parts.append(svg_text(0.0, bottom + _TITLE - 10, heatmap.label, "start"))
        frame = Frame((0.0, max(last, 1.0)), (0.0, 1.0), left, bottom + _TITLE, right, bottom + _TITLE)
        panel, bottom = _draw_panel(frame, heatmap, group, row)
        parts += panel
    parts += draw_x_axis(Frame((0.0, max(last, 1.0)), (0.0, 1.0), left, 0.0, right, bottom), x_label)
    largest = ", ".join(
        f"{heatmap.label}: the largest is {_divide_by_group_mean(heatmap)[-1].max():.2f} in the end"
        for heatmap in heatmaps
    )
    return wrap_svg(parts, f"{unit} against {x_label}. {largest}", width, bottom + 44)


def _draw_panel(frame: Frame, heatmap: Heatmap, group: str, row: str) -> tuple[list[str], float]:
    """Draw the stripes of all groups below one another; return them and the y at which they end."""
    ratios, (_, groups, rows) = _divide_by_group_mean(heatmap), heatmap.counts.shape
    columns = np.array_split(np.arange(len(ratios)), min(len(ratios), int(frame.right - frame.left) // 8))
    means = np.stack([ratios[column].mean(0) for column in columns])
    edges = [frame.left, *(frame.x_pixel(heatmap.x[column[-1]]) for column in columns)]
    shown = sorted({round(i * (groups - 1) / max(min(groups, _MAX_GROUPS) - 1, 1)) for i in range(_MAX_GROUPS)})
    row_height = min(max(72 / rows, 1.5), 12.0)
    parts, top = [], frame.top
    for number in (n for n in shown if n < groups):
        height = rows * row_height
        parts.append(svg_text(frame.left - 8, top + height / 2 + 4, f"{group} {number + 1}", "end"))
        parts.append(f'<path class="even" d="{_rectangle_path(edges[0], top, edges[-1] - edges[0], height)}"/>')
        for n in range(rows):
            tooltip = f"{heatmap.label}, {group} {number + 1}, {row} {n + 1}: {ratios[-1, number, n]:.2f} in the end"
            stripes = _draw_stripes(means[:, number, n], edges, top + n * row_height, row_height)
            parts.append(f"<g><title>{html.escape(tooltip)}</title>{''.join(stripes)}</g>")
        top += height + _GAP
    return parts, top - _GAP


def _divide_by_group_mean(heatmap: Heatmap) -> Float[np.ndarray, "times groups rows"]:
    mean = heatmap.counts.mean(-1, keepdims=True)
    return np.divide(heatmap.counts, mean, out=np.ones(heatmap.counts.shape), where=mean > 0)


def _draw_stripes(
    values: Float[np.ndarray, "columns"], edges: Sequence[float], top: float, row_height: float
) -> Iterable[str]:
    """Draw one path per level, merging neighbors of the same level into one rectangle."""
    levels = np.searchsorted(_LEVEL_EDGES, values, side="right")
    starts = [0, *(i for i in range(1, len(levels)) if levels[i] != levels[i - 1]), len(levels)]
    by_level: dict[str, list[str]] = {}
    for start, stop in itertools.pairwise(starts):
        rectangle = _rectangle_path(edges[start], top, edges[stop] - edges[start], row_height)
        by_level.setdefault(LEVELS[levels[start]], []).append(rectangle)
    return [f'<path class="{name}" d="{"".join(d)}"/>' for name, d in by_level.items() if name != "even"]


def _rectangle_path(x: float, y: float, width: float, height: float | int) -> str:
    return f"M{x:.1f},{y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"


def _draw_level_legend(unit: str, width: int) -> tuple[list[str], float]:
    """Draw a swatch per level, next to the unit if there is room, else below; return it and the y at which it ends."""
    swatch_width, right = 34.0, width - 14.0
    start = right - swatch_width * len(LEVELS)
    y = 22.0 if estimate_text_width(unit) + 20 > start else 4.0
    parts = [
        svg_text(0.0, 16.0, unit, "start"),
        f'<path class="even" d="{_rectangle_path(start, y, right - start, 12)}"/>',
    ]
    for level, name in enumerate(LEVELS):
        x = start + swatch_width * level
        if name != "even":
            parts.append(f'<path class="{name}" d="{_rectangle_path(x, y, swatch_width, 12)}"/>')
        if level:
            parts.append(svg_text(x, y + 26, f"{_LEVEL_EDGES[level - 1]:g}", "middle"))
    return parts, y + 30
