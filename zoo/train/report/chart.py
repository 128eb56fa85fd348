"""Line charts as inline SVG, colored by the page's style sheet. No library, no script."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from ..progress import format_si

_MAX_POINTS = 1200
NUM_COLORS = 8
"""Number of curve colors in the style sheet; further curves reuse them."""
LEGEND_LINE_HEIGHT = 20.0


@dataclass(frozen=True)
class Curve:
    """A curve over steps or tokens: a line with a dot per value, a line alone, or with `smooth` a moving average over
    faint values."""

    label: str
    x: Sequence[int]
    values: Sequence[float | int]
    smooth: bool = False
    dots: bool = True


@dataclass(frozen=True)
class Frame:
    """The plot area: ranges of x and y, and its box in pixels."""

    x: tuple[float, float]
    y: tuple[float, float]
    left: float
    top: float
    right: float
    bottom: float

    def x_pixel(self, x: float | int) -> float:
        return self.left + (x - self.x[0]) / (self.x[1] - self.x[0]) * (self.right - self.left)

    def y_pixel(self, y: float | int) -> float:
        return self.bottom - (y - self.y[0]) / (self.y[1] - self.y[0]) * (self.bottom - self.top)

    def path(self, xs: Iterable[float | int], ys: Iterable[float | int]) -> str:
        return "M" + "L".join(f"{self.x_pixel(x):.1f},{self.y_pixel(y):.1f}" for x, y in zip(xs, ys, strict=True))


def draw_line_chart(
    curves: Sequence[Curve],
    baselines: Mapping[str, float | int],
    *,
    unit: str,
    x_label: str = "steps",
    log: bool = False,
    width: int = 860,
    height: int = 400,
) -> str:
    """Draw `curves`, in `unit`, against `x_label`, with a dashed line per baseline, as an `<svg>` element.

    Skips values that are not finite. Cuts off the initial drop of a long smoothed curve, so that the rest is readable.
    With `log`, the y axis is logarithmic, if no value is 0 or less. CSS classes: `axis`, `grid`, `curve0` ..., `raw`,
    `dot`, `floor`.
    """
    baselines = {label: float(value) for label, value in baselines.items()}
    data = [(curve, *_drop_nonfinite(curve)) for curve in curves]
    data = [(curve, x, values) for curve, x, values in data if len(values)]
    if not data:
        return "<p>No metrics were logged.</p>"
    log = log and min(float(values.min()) for _, _, values in data) > 0
    if log:
        data = [(curve, x, np.log10(values)) for curve, x, values in data]
        baselines = {label: math.log10(value) for label, value in baselines.items() if value > 0}
    rows = wrap_legend(unit, [curve.label for curve, _, _ in data], width)
    frame = _fit_frame(data, baselines.values(), width, height, lines=len(rows), cut=not log)
    box = f"box{width}x{height}x{len(rows)}"  # charts of one page that share a name share the box
    parts = [
        *draw_y_grid(frame, unit, log=log),
        *draw_x_axis(frame, x_label),
        f'<clipPath id="{box}">{_draw_clip_box(frame)}</clipPath>',
        f'<g clip-path="url(#{box})">',
    ]
    for number, (curve, x, values) in enumerate(data):
        parts += _draw_curve(frame, number % NUM_COLORS, curve, x, values, x_label, log)
    parts.append("</g>")
    for label, value in baselines.items():
        y = frame.y_pixel(value)
        parts.append(f'<path class="floor" d="M{frame.left},{y:.1f}H{frame.right}"/>')
        parts.append(svg_text(frame.right - 4, y - 6, f"{label} {10**value if log else value:.3f}", "end"))
    parts += _draw_line_legend(frame, rows)
    return wrap_svg(parts, f"{unit} against {x_label}", width, height)


def wrap_svg(parts: Iterable[str], title: str, width: float | int, height: float | int) -> str:
    """Wrap SVG elements into an `<svg class="chart">`, which the style sheet colors."""
    head = f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html.escape(title)}">'
    return head + "".join(parts) + "</svg>"


def svg_text(x: float | int, y: float | int, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def estimate_text_width(words: str) -> float:
    """Estimate the width of a text in pixels."""
    return 6.6 * len(words)


def draw_x_axis(frame: Frame, x_label: str) -> list[str]:
    """Draw the x axis below the frame, with ticks and label."""
    parts = []
    count = min(round((frame.right - frame.left) / 90), max(int(frame.x[1] - frame.x[0]), 1))  # steps are whole numbers
    for x in choose_ticks(*frame.x, count=count):
        label = format_si(x) if frame.x[1] >= 1e6 else f"{x:,.0f}" if x >= 1 or x == 0 else f"{x:g}"
        parts.append(f'<path class="axis" d="M{frame.x_pixel(x):.1f},{frame.bottom:g}v5"/>')
        parts.append(svg_text(frame.x_pixel(x), frame.bottom + 20, label, "middle"))
    parts.append(f'<path class="axis" d="M{frame.left},{frame.bottom:g}H{frame.right}"/>')
    parts.append(svg_text((frame.left + frame.right) / 2, frame.bottom + 38, x_label, "middle"))
    return parts


def smooth_values(values: Float[np.ndarray, "points"], fraction: float = 0.03) -> Float[np.ndarray, "points"]:
    """Smooth by an exponential moving average with a time constant of `fraction` of the points; bias-corrected."""
    keep = math.exp(-1 / max(fraction * len(values), 1))
    out, total, weight = np.empty(len(values)), 0.0, 0.0
    for i, value in enumerate(values):
        total, weight = keep * total + value, keep * weight + 1
        out[i] = total / weight
    return out


def choose_ticks(low: float, high: float, count: int) -> list[float]:
    """Choose about `count` ticks from `low` to `high`, spaced by 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def choose_log_ticks(low: float, high: float, count: int) -> dict[float, str]:
    """Choose about `count` ticks from 10**low to 10**high, as their logarithms with labels: powers of ten, these times
    1, 2 and 5, or the ticks of a linear axis, whichever first gives two."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    candidates = [[10.0**power for power in decades], [f * 10.0**power for power in decades for f in (1, 2, 5)]]
    for numbers in (*candidates, choose_ticks(10**low, 10**high, count)):
        inside = [number for number in numbers if number > 0 and low <= math.log10(number) <= high]
        if len(inside) > 1:
            break
    return {math.log10(number): f"{number:.6g}" for number in inside[:: math.ceil(len(inside) / (count + 2))]}


def _drop_nonfinite(curve: Curve) -> tuple[Float[np.ndarray, "points"], Float[np.ndarray, "points"]]:
    x, values = np.asarray(curve.x, np.float64), np.asarray(curve.values, np.float64)
    finite = np.isfinite(values)
    return x[finite], values[finite]


def _fit_frame(data: Sequence, baselines: Iterable[float], width: int, height: int, lines: int, cut: bool) -> Frame:
    everything = np.concatenate([values for _, _, values in data])
    cut = cut and len(everything) > 50 and any(curve.smooth for curve, _, _ in data)
    high = float(np.quantile(everything, 0.97)) if cut else float(everything.max())
    low = min(float(everything.min()), *baselines, high)
    # A flat curve still needs a height.
    margin = 0.06 * (max(high - low, 1e-6 * abs(high)) or 1.0)
    low, high = low - margin, high + margin
    last = max(float(x[-1]) for _, x, _ in data)
    top = 14.0 + LEGEND_LINE_HEIGHT * lines
    return Frame((0.0, max(last, 1.0)), (low, high), left=52.0, top=top, right=width - 14.0, bottom=height - 44.0)


def draw_y_grid(frame: Frame, unit: str, *, log: bool = False) -> list[str]:
    """Draw the horizontal grid lines with their numbers, and the unit above. With `log`, y is log10 of the numbers."""
    count = max(round((frame.bottom - frame.top) / 55), 4)
    ticks = choose_log_ticks(*frame.y, count) if log else {y: f"{y:.6g}" for y in choose_ticks(*frame.y, count)}
    parts = []
    for y, label in ticks.items():
        parts.append(f'<path class="grid" d="M{frame.left},{frame.y_pixel(y):.1f}H{frame.right}"/>')
        parts.append(svg_text(frame.left - 8, frame.y_pixel(y) + 4, label, "end"))
    parts.append(svg_text(0.0, 16.0, unit, "start"))
    return parts


def _draw_curve(
    frame: Frame, number: int, curve: Curve, x_values: np.ndarray, values: np.ndarray, x_label: str, log: bool
) -> list[str]:
    stride = math.ceil(len(x_values) / _MAX_POINTS)
    if curve.smooth:
        return [
            f'<path class="raw curve{number}" d="{frame.path(x_values[::stride], values[::stride])}"/>',
            f'<path class="line curve{number}" d="{frame.path(x_values[::stride], smooth_values(values)[::stride])}"/>',
        ]
    line = f'<path class="line curve{number}" d="{frame.path(x_values[::stride], values[::stride])}"/>'
    if not curve.dots:
        return [line]
    where = "at step {:,.0f}" if x_label == "steps" else f"after {{:,.0f}} {x_label}"
    dots = [
        f'<circle class="dot curve{number}" cx="{frame.x_pixel(x):.1f}" cy="{frame.y_pixel(y):.1f}" r="3.2">'
        f"<title>{html.escape(f'{curve.label} '.lstrip())}{where.format(x)}: {10**y if log else y:.4f}</title></circle>"
        for x, y in zip(x_values[::stride], values[::stride], strict=True)
    ]
    return [line, *dots]


def wrap_legend(unit: str, labels: Sequence[str], width: int) -> list[list[tuple[int, str]]]:
    """Wrap numbered labels into lines of `width`; the first line shares its space with the unit."""
    rows: list[list[tuple[int, str]]] = [[]]
    room = width - 14.0 - estimate_text_width(unit)
    for number, label in enumerate(labels):
        if rows[-1] and room < estimate_text_width(label) + 46:
            rows.append([])
            room = width - 14.0
        rows[-1].append((number, label))
        room -= estimate_text_width(label) + 46
    return rows


def _draw_line_legend(frame: Frame, rows: Sequence[Sequence[tuple[int, str]]]) -> list[str]:
    """Draw the labels in the top margin, right-aligned, each with a sample of its line."""
    parts = []
    for line, row in enumerate(rows):
        x, y = frame.right, 16.0 + LEGEND_LINE_HEIGHT * line
        for number, label in reversed(row):
            if not label:  # the only curve, which the unit names
                continue
            x -= estimate_text_width(label) + 28
            parts.append(f'<path class="line curve{number % NUM_COLORS}" d="M{x:.1f},{y - 4:g}h20"/>')
            parts.append(svg_text(x + 26, y, label, "start"))
            x -= 18
    return parts


def _draw_clip_box(frame: Frame) -> str:
    # Wider than the data by the radius of a dot.
    width, height = frame.right - frame.left + 5, frame.bottom - frame.top
    return f'<rect x="{frame.left}" y="{frame.top}" width="{width}" height="{height}"/>'
