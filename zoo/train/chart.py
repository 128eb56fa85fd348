"""A line chart as inline SVG, coloured by the page's style sheet: no library, no script."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

MOST_POINTS = 1200


@dataclass(frozen=True)
class Curve:
    """Values by step. `smooth` draws the values faintly and an average over them; without it each value is a dot."""

    label: str
    steps: Sequence[int]
    values: Sequence[float | int]
    smooth: bool = False


@dataclass(frozen=True)
class _Frame:
    """Where data lies on the paper: x and y ranges, and the box in pixels."""

    x: tuple[float, float]
    y: tuple[float, float]
    left: float
    top: float
    right: float
    bottom: float

    def across(self, x: float) -> float:
        return self.left + (x - self.x[0]) / (self.x[1] - self.x[0]) * (self.right - self.left)

    def down(self, y: float) -> float:
        return self.bottom - (y - self.y[0]) / (self.y[1] - self.y[0]) * (self.bottom - self.top)

    def path(self, xs: Iterable[float], ys: Iterable[float]) -> str:
        return "M" + "L".join(f"{self.across(x):.1f},{self.down(y):.1f}" for x, y in zip(xs, ys, strict=True))


def chart(
    curves: Sequence[Curve], floors: Mapping[str, float | int], *, unit: str, width: int = 860, height: int = 400
) -> str:
    """`curves` against steps, and a dashed line across for each of `floors`, as an `<svg>` element.

    Values that are not finite are left out. The first fall of a long curve is cut off at the top, so that the rest has
    room. Classes that the page colours: `axis`, `grid`, `curve0` ..., `raw`, `dot`, `floor`.
    """
    floors = {label: float(value) for label, value in floors.items()}
    data = [(curve, *_finite(curve)) for curve in curves]
    data = [(curve, steps, values) for curve, steps, values in data if len(values)]
    if not data:
        return "<p>No metrics were logged.</p>"
    frame = _frame(data, floors.values(), width, height)
    parts = [
        *_axes(frame, unit),
        f'<clipPath id="box{width}">{_box(frame)}</clipPath>',
        f'<g clip-path="url(#box{width})">',
    ]
    for number, (curve, steps, values) in enumerate(data):
        parts += _draw(frame, number, curve, steps, values)
    parts.append("</g>")
    for label, value in floors.items():
        y = frame.down(value)
        parts.append(f'<path class="floor" d="M{frame.left},{y:.1f}H{frame.right}"/>')
        parts.append(_text(frame.right - 4, y - 6, f"{label} {value:.3f}", "end"))
    parts += _legend(frame, [curve for curve, _, _ in data])
    title = html.escape(f"{unit} against steps")
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{title}">{"".join(parts)}</svg>'


def smoothed(values: Float[np.ndarray, "points"], share: float = 0.03) -> Float[np.ndarray, "points"]:
    """Exponential average whose weights fall by e within that share of the points; unbiased at the beginning."""
    keep = math.exp(-1 / max(share * len(values), 1))
    out, total, weight = np.empty(len(values)), 0.0, 0.0
    for i, value in enumerate(values):
        total, weight = keep * total + value, keep * weight + 1
        out[i] = total / weight
    return out


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _finite(curve: Curve) -> tuple[Float[np.ndarray, "points"], Float[np.ndarray, "points"]]:
    steps, values = np.asarray(curve.steps, np.float64), np.asarray(curve.values, np.float64)
    finite = np.isfinite(values)
    return steps[finite], values[finite]


def _frame(data: Sequence, floors: Iterable[float], width: int, height: int) -> _Frame:
    everything = np.concatenate([values for _, _, values in data])
    high = float(np.quantile(everything, 0.97)) if len(everything) > 50 else float(everything.max())
    low = min(float(everything.min()), *floors, high)
    # A curve that is flat, to what a float can tell, still needs a height.
    margin = 0.06 * (max(high - low, 1e-6 * abs(high)) or 1.0)
    low, high = low - margin, high + margin
    last = max(float(steps[-1]) for _, steps, _ in data)
    return _Frame((0.0, max(last, 1.0)), (low, high), left=52.0, top=34.0, right=width - 14.0, bottom=height - 44.0)


def _axes(frame: _Frame, unit: str) -> list[str]:
    parts = []
    for y in ticks(*frame.y, count=round((frame.bottom - frame.top) / 55)):
        parts.append(f'<path class="grid" d="M{frame.left},{frame.down(y):.1f}H{frame.right}"/>')
        parts.append(_text(frame.left - 8, frame.down(y) + 4, f"{y:.6g}", "end"))
    for x in ticks(*frame.x, count=round((frame.right - frame.left) / 90)):
        parts.append(f'<path class="axis" d="M{frame.across(x):.1f},{frame.bottom}v5"/>')
        parts.append(_text(frame.across(x), frame.bottom + 20, f"{x:,.0f}" if x >= 1 or x == 0 else f"{x:g}", "middle"))
    parts.append(f'<path class="axis" d="M{frame.left},{frame.bottom}H{frame.right}"/>')
    parts.append(_text((frame.left + frame.right) / 2, frame.bottom + 38, "steps", "middle"))
    parts.append(_text(0.0, 16.0, unit, "start"))
    return parts


def _draw(frame: _Frame, number: int, curve: Curve, steps: np.ndarray, values: np.ndarray) -> list[str]:
    stride = math.ceil(len(steps) / MOST_POINTS)
    if curve.smooth:
        return [
            f'<path class="raw curve{number}" d="{frame.path(steps[::stride], values[::stride])}"/>',
            f'<path class="line curve{number}" d="{frame.path(steps[::stride], smoothed(values)[::stride])}"/>',
        ]
    dots = [
        f'<circle class="dot curve{number}" cx="{frame.across(x):.1f}" cy="{frame.down(y):.1f}" r="3.2">'
        f"<title>{html.escape(curve.label)} at step {x:,.0f}: {y:.4f}</title></circle>"
        for x, y in zip(steps[::stride], values[::stride], strict=True)
    ]
    return [f'<path class="line curve{number}" d="{frame.path(steps[::stride], values[::stride])}"/>', *dots]


def _legend(frame: _Frame, curves: Sequence[Curve]) -> list[str]:
    """Labels in the top margin, the last curve's at the right end."""
    parts, x = [], frame.right
    for number, curve in reversed(list(enumerate(curves))):
        parts.append(_text(x, 16.0, curve.label, "end"))
        x -= 6.6 * len(curve.label) + 28
        parts.append(f'<path class="line curve{number}" d="M{x:.1f},12h20"/>')
        x -= 18
    return parts


def _box(frame: _Frame) -> str:
    # Wider than the data by a dot's radius.
    width, height = frame.right - frame.left + 5, frame.bottom - frame.top
    return f'<rect x="{frame.left}" y="{frame.top}" width="{width}" height="{height}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
