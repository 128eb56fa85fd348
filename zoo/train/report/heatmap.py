"""Shares over time as inline SVG: a row for each of those that share, colored by how far it is from an even share."""

import html
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from .chart import Frame, draw_x_axis, estimate_text_width, svg_text, wrap_svg

_LEVEL_EDGES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
LEVELS = ("less3", "less2", "less1", "even", "more1", "more2", "more3")
"""Classes that the page colors: below the first border, between each two, above the last."""
_MAX_GROUPS = 8
_LEFT, _TITLE, _GAP = 70.0, 34.0, 6.0


@dataclass(frozen=True)
class Heatmap:
    """What was counted, by step or by tokens: of several groups what each row had. Rows of a group share with one
    another: layers and their experts, say."""

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
    """One panel above another, each with a stripe for every row of every group, as an `<svg>` element.

    A count is divided by the mean over its group, so that 1 is an even share. Of many groups some are shown, the first
    and the last among them; counts that lie close in time are averaged. Classes that the page colors: `even`, `less1`
    to `less3`, `more1` to `more3`.
    """
    heatmaps = [heat for heat in heatmaps if heat.counts.size]
    if not heatmaps:
        return "<p>No metrics were logged.</p>"
    left, right = _LEFT, width - 14.0
    last = float(max(heat.x[-1] for heat in heatmaps))
    legend, bottom = _draw_level_legend(unit, width)
    parts = list(legend)
    for heat in heatmaps:
        parts.append(svg_text(0.0, bottom + _TITLE - 10, heat.label, "start"))
        frame = Frame((0.0, max(last, 1.0)), (0.0, 1.0), left, bottom + _TITLE, right, bottom + _TITLE)
        drawn, bottom = _draw_panel(frame, heat, group, row)
        parts += drawn
    parts += draw_x_axis(Frame((0.0, max(last, 1.0)), (0.0, 1.0), left, 0.0, right, bottom), x_label)
    largest = ", ".join(
        f"{heat.label}: the largest is {_divide_by_group_mean(heat)[-1].max():.2f} in the end" for heat in heatmaps
    )
    return wrap_svg(parts, f"{unit} against {x_label}. {largest}", width, bottom + 44)


def _draw_panel(frame: Frame, heatmap: Heatmap, group: str, row: str) -> tuple[list[str], float]:
    """The stripes of all groups below one another, and where they end."""
    shares, (_, groups, rows) = _divide_by_group_mean(heatmap), heatmap.counts.shape
    columns = np.array_split(np.arange(len(shares)), min(len(shares), int(frame.right - frame.left) // 8))
    means = np.stack([shares[column].mean(0) for column in columns])
    edges = [frame.left, *(frame.x_pixel(heatmap.x[column[-1]]) for column in columns)]
    shown = sorted({round(i * (groups - 1) / max(min(groups, _MAX_GROUPS) - 1, 1)) for i in range(_MAX_GROUPS)})
    tall = min(max(72 / rows, 1.5), 12.0)
    parts, top = [], frame.top
    for number in (n for n in shown if n < groups):
        parts.append(svg_text(frame.left - 8, top + rows * tall / 2 + 4, f"{group} {number + 1}", "end"))
        parts.append(f'<path class="even" d="{_rectangle_path(edges[0], top, edges[-1] - edges[0], rows * tall)}"/>')
        for n in range(rows):
            said = f"{heatmap.label}, {group} {number + 1}, {row} {n + 1}: {shares[-1, number, n]:.2f} in the end"
            stripes = _draw_stripes(means[:, number, n], edges, top + n * tall, tall)
            parts.append(f"<g><title>{html.escape(said)}</title>{''.join(stripes)}</g>")
        top += rows * tall + _GAP
    return parts, top - _GAP


def _divide_by_group_mean(heatmap: Heatmap) -> Float[np.ndarray, "times groups rows"]:
    mean = heatmap.counts.mean(-1, keepdims=True)
    return np.divide(heatmap.counts, mean, out=np.ones(heatmap.counts.shape), where=mean > 0)


def _draw_stripes(
    values: Float[np.ndarray, "columns"], edges: Sequence[float], top: float, row_height: float
) -> Iterable[str]:
    """One path for each level, with neighbors of one level as one rectangle."""
    levels = np.searchsorted(_LEVEL_EDGES, values, side="right")
    starts = [0, *(i for i in range(1, len(levels)) if levels[i] != levels[i - 1]), len(levels)]
    drawn: dict[str, list[str]] = {}
    for start, stop in itertools.pairwise(starts):
        place = _rectangle_path(edges[start], top, edges[stop] - edges[start], row_height)
        drawn.setdefault(LEVELS[levels[start]], []).append(place)
    return [f'<path class="{name}" d="{"".join(d)}"/>' for name, d in drawn.items() if name != "even"]


def _rectangle_path(x: float, y: float, width: float, height: float | int) -> str:
    return f"M{x:.1f},{y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"


def _draw_level_legend(unit: str, width: int) -> tuple[list[str], float]:
    """A swatch for each level with the borders between them, beside the unit or below it; and where it ends."""
    wide, right = 34.0, width - 14.0
    below = estimate_text_width(unit) + 20 > right - wide * len(LEVELS)
    y = 22.0 if below else 4.0
    start = right - wide * len(LEVELS)
    parts = [
        svg_text(0.0, 16.0, unit, "start"),
        f'<path class="even" d="{_rectangle_path(start, y, right - start, 12)}"/>',
    ]
    for place, name in enumerate(LEVELS):
        x = start + wide * place
        if name != "even":
            parts.append(f'<path class="{name}" d="{_rectangle_path(x, y, wide, 12)}"/>')
        if place:
            parts.append(svg_text(x, y + 26, f"{_LEVEL_EDGES[place - 1]:g}", "middle"))
    return parts, y + 30
