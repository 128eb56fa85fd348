"""Charts of a report, drawn by matplotlib.

A chart is data, and draws itself into a figure:

    chart = LineChart([Curve("training", steps, losses, smooth=True)], unit="nats per token")
    svg = chart.draw_svg(width=860)
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from zoo._optional import import_optional
from zoo._terminal import escape_controls

from .._figure import COLORS, INK, INSTALL, POINTS_PER_INCH, SHOWN_UNDERSCORE, draw_svg

_STYLES = ("-", "-", (0, (7, 3)), (0, (2, 3)), "-", (0, (10, 4)), (0, (4, 4)), (0, (9, 3, 2, 3)))
_MARKERS = ("o", "s", "^")
"""Markers of the first eight series of a scatter chart, the next eight, and so on."""
_MAX_POINTS = 1000


class Chart:
    """Data that a matplotlib figure shows."""

    description: str
    """Text for readers that do not see the chart."""

    def draw(self, figure: Any) -> None:
        """Draw the chart into a matplotlib figure."""
        raise NotImplementedError

    def choose_height(self, width: int) -> int:
        """Return the height of the chart at a width, in pixels."""
        ratio = 0.46 if width > 600 else 0.75
        return round(ratio * width)

    def draw_svg(self, *, width: int) -> str:
        """Draw the chart as an `<svg>` element of this width, in pixels. **Raises** `ImportError` without
        matplotlib."""

        def draw(figure: Any) -> None:
            figure.set_layout_engine("constrained")
            self.draw(figure)

        return draw_svg(draw, width=width, height=self.choose_height(width), title=self.description)


@dataclasses.dataclass(frozen=True)
class Curve:
    """A series of values: a line with a dot per value, only a line, or with `smooth` a moving average over faint
    values."""

    label: str
    x: Sequence[float | int]
    values: Sequence[float | int]
    smooth: bool = False
    dots: bool = True

    def drop_nonfinite(self) -> tuple[Float[np.ndarray, "points"], Float[np.ndarray, "points"]]:
        """Return x and values where the value is finite."""
        values = np.asarray(self.values, np.float64)
        is_finite = np.isfinite(values)
        return np.asarray(self.x, np.float64)[is_finite], values[is_finite]


@dataclasses.dataclass(frozen=True)
class LineChart(Chart):
    """Curves in `unit` against `x_label`, with a dashed line for each baseline.

    Values that are not finite are skipped. The initial drop of a long smoothed curve is cut off, to keep the rest
    readable. With `log`, the y axis is logarithmic, unless a value is 0 or less.
    """

    curves: Sequence[Curve]
    unit: str
    x_label: str = "steps"
    baselines: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
    log: bool = False

    @property
    def description(self) -> str:
        return f"{self.unit} against {self.x_label}"

    def draw(self, figure: Any) -> None:
        axes = _add_axes(figure, self)
        drawn = []
        for number, curve in enumerate(self.curves):
            x, values = curve.drop_nonfinite()
            if len(values):
                _draw_curve(axes, number, curve, x, values)
                axes.set_xlim(0, max(axes.get_xlim()[1] if drawn else 1.0, 1.01 * x[-1]))
                drawn.append(values)
        for label, value in self._baselines.items():
            axes.axhline(value, color=INK, alpha=0.6, linestyle=(0, (5, 4)), linewidth=1)
            place = {"xy": (1, value), "xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
            axes.annotate(f"{label} {value:.3f}", xytext=(-2, 4), ha="right", **place)
        if drawn:
            self._set_limits(axes, np.concatenate(drawn))
        axes.locator_params(axis="x", integer=True, nbins=max(int(figure.get_figwidth() * 0.8), 3))
        axes.xaxis.set_major_formatter(import_optional("matplotlib.ticker", INSTALL).EngFormatter(sep=""))
        _write_legend(figure, axes)

    @property
    def _baselines(self) -> dict[str, float]:
        return {label: float(value) for label, value in self.baselines.items() if math.isfinite(value)}

    def _set_limits(self, axes: Any, values: Float[np.ndarray, "points"]) -> None:
        if self.log and values.min() > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
            if values.max() < 100 * values.min():
                axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
            return
        is_cut = len(values) > 50 and any(curve.smooth for curve in self.curves)
        high = float(np.quantile(values, 0.97) if is_cut else values.max())
        low = min([float(values.min()), high, *self._baselines.values()])
        high = max([high, *self._baselines.values()])
        margin = 0.06 * (max(high - low, 1e-6 * abs(high)) or 1.0)  # a flat curve still needs a height
        axes.set_ylim(low - margin, high + margin)


@dataclasses.dataclass(frozen=True)
class ScatterChart(Chart):
    """Values of each series in `unit` over a logarithmic x axis: cost against quality. The y axis starts at 0, unless
    `from_zero` is False.

    Values that are not finite are skipped. A curve with `dots=False` is a line without markers. **Raises** `ValueError`
    for an x that is not positive.
    """

    curves: Sequence[Curve]
    unit: str
    x_label: str
    from_zero: bool = True

    def __post_init__(self) -> None:
        if any(x <= 0 for curve in self.curves for x in curve.x):
            raise ValueError(f"{self.x_label}: a logarithmic axis takes positive numbers only")

    @classmethod
    def of_rows(
        cls, rows: Sequence[Mapping[str, Any]], label: str, *, x: str, values: str, unit: str, x_label: str
    ) -> "ScatterChart":
        """Make a chart of the rows of a table: one series per entry of column `label`, of columns `x` and `values`."""
        curves = []
        for entry in dict.fromkeys(row[label] for row in rows):
            group = [row for row in rows if row[label] == entry]
            curves.append(Curve(entry, [row[x] for row in group], [row[values] for row in group]))
        return cls(curves, unit, x_label)

    @property
    def description(self) -> str:
        return f"{self.unit} against {self.x_label}"

    def draw(self, figure: Any) -> None:
        axes = _add_axes(figure, self)
        axes.set_xscale("log", base=2)
        for number, curve in enumerate(self.curves):
            marker = _MARKERS[number // len(COLORS) % len(_MARKERS)] if curve.dots else ""
            style = {"marker": marker, "markersize": 7, "color": COLORS[number % len(COLORS)]}
            axes.plot(*curve.drop_nonfinite(), label=_format_label(curve.label), **style)
        if self.from_zero:
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(_format_binary)
        _write_legend(figure, axes)


@dataclasses.dataclass(frozen=True)
class ImageGrid(Chart):
    """Images row by row, each below its caption; a frame marks the images that were `missed`.

    An image is "height width" of grayscale, from 0, black, to 1, white, or "height width 3" of colors. Cells have
    `cell` pixels of width. **Raises** `ValueError` for no images, and unless each image has one caption and one mark.
    """

    images: Sequence[Shaped[np.ndarray, "_ _ ..."]] | Float[np.ndarray, "count height width"]
    captions: Sequence[str]
    missed: Sequence[bool]
    description: str
    cell: int = 66

    def __post_init__(self) -> None:
        if not len(self.images) == len(self.captions) == len(self.missed) > 0:
            counts = f"{len(self.images)} images, {len(self.captions)} captions and {len(self.missed)} marks"
            raise ValueError(f"{counts}: each image has one caption and one mark")

    def choose_height(self, width: int) -> int:
        lines = 1 + max(caption.count("\n") for caption in self.captions)
        return (self.cell + 18 * lines) * math.ceil(len(self.images) / (width // self.cell))

    def draw(self, figure: Any) -> None:
        columns = round(figure.get_figwidth() * POINTS_PER_INCH) // self.cell
        grid = list(figure.subplots(math.ceil(len(self.images) / columns), columns, squeeze=False).flat)
        for axes in grid[len(self.images) :]:
            axes.axis("off")
        for axes, image, caption, is_missed in zip(grid, self.images, self.captions, self.missed, strict=False):
            axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="none")
            axes.set_title(caption, fontsize=10, parse_math=False)
            axes.set(xticks=(), yticks=())
            axes.spines[:].set(color=COLORS[1], linewidth=3, visible=is_missed)


@dataclasses.dataclass(frozen=True)
class Picture(Chart):
    """SVG that `make(width=...)` draws, such as `partial(zoo.tools.draw.draw_schedule, table)`."""

    make: Callable[..., str]

    def draw_svg(self, *, width: int) -> str:
        return self.make(width=width)


def _draw_curve(axes: Any, number: int, curve: Curve, x: np.ndarray, values: np.ndarray) -> None:
    thin = slice(None, None, math.ceil(len(x) / _MAX_POINTS))
    style = {"color": COLORS[number % len(COLORS)], "linestyle": _STYLES[number % len(_STYLES)], "linewidth": 2}
    if curve.smooth:
        axes.plot(x[thin], values[thin], color=style["color"], alpha=0.3, linewidth=1)
        values = smooth_values(values)
    elif curve.dots:
        style |= {"marker": "o", "markersize": 5}
    axes.plot(x[thin], values[thin], label=_format_label(curve.label), **style)


def smooth_values(values: Float[np.ndarray, "points"], fraction: float = 0.03) -> Float[np.ndarray, "points"]:
    """Smooth by an exponential moving average with a time constant of `fraction` of the points; bias-corrected."""
    keep = math.exp(-1 / max(fraction * len(values), 1))
    smoothed = np.empty(len(values))
    total = weight = 0.0
    for number, value in enumerate(values):
        total = keep * total + value
        weight = keep * weight + 1
        smoothed[number] = total / weight
    return smoothed


def _add_axes(figure: Any, chart: LineChart | ScatterChart) -> Any:
    axes = figure.add_subplot()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color=INK, alpha=0.15)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", which="both", length=0)
    axes.set_title(chart.unit, loc="left", fontsize=11)
    axes.set_xlabel(chart.x_label)
    return axes


def _write_legend(figure: Any, axes: Any) -> None:
    """Write the labels above the chart, in as many columns as fit."""
    if not axes.lines:
        axes.annotate("no values were logged", (0.5, 0.5), xycoords="axes fraction", ha="center")
    handles, labels = axes.get_legend_handles_labels()
    if any(labels):
        make_path = import_optional("matplotlib.textpath", INSTALL).TextPath
        shown = [escape_controls(label, keep=SHOWN_UNDERSCORE) for label in labels]
        longest = max(make_path((0, 0), label, size=11).get_extents().width for label in shown)
        fit = int(figure.get_figwidth() * POINTS_PER_INCH // (longest + 55))  # with its line and the space around
        columns = min(max(fit, 1), len(labels))
        style = {"frameon": False, "fontsize": 11, "borderaxespad": 0}
        figure.legend(handles, labels, loc="outside upper right", ncols=columns, **style)


def _format_label(label: str) -> str:
    """Return a label that matplotlib shows: it hides labels that begin with an underscore."""
    if label.startswith("_"):
        return f"{SHOWN_UNDERSCORE}{label}"
    return label


def _format_binary(value: float, position: int) -> str:
    """Format a power of two: 2^-8, 0.25, 512, and with a binary prefix 1Ki."""
    power = round(math.log2(value))
    if power < -2:
        return f"2^{power}"
    if power < 0:
        return f"{value:g}"
    prefixes = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
    index = min(power // 10, len(prefixes) - 1)
    return f"{2 ** (power - 10 * index):g}{prefixes[index]}"
