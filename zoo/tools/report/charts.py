"""Charts of a report, drawn by matplotlib as inline SVG in the colors of the page.

A chart is data, so that a report can keep it and draw it again:

    chart = LineChart([Curve("training", steps, losses, smooth=True)], unit="nats per token")
    svg = draw_svg(chart, width=860, height=400)
"""

import dataclasses
import functools
import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from jaxtyping import Float

from zoo._files import to_jsonable
from zoo._optional import import_optional
from zoo._terminal import escape_controls
from zoo.train.progress import format_si

INSTALL = "pip install 'equizoo[tools]'"
COLORS = {
    "#2563c9": "--train",
    "#d9601a": "--held-out",
    "#2f8f5b": "--third",
    "#8a4fc7": "--fourth",
    "#c23b4a": "--fifth",
    "#8f7100": "--sixth",
    "#0f8ba0": "--seventh",
    "#b5449a": "--eighth",
    "#1b1f24": "--ink",
    "#626b76": "--soft",
    "#e2e5e9": "--rule",
    "#ffffff": "--paper",
}
"""Colors as matplotlib writes them, and the variables of the page that replace them, which know light and dark."""
_CURVES = tuple(COLORS)[:8]
_SOFT, _RULE, _PAPER = tuple(COLORS)[9:]
_STYLES = ("-", "-", (0, (7, 3)), (0, (2, 3)), "-", (0, (10, 4)), (0, (4, 4)), (0, (9, 3, 2, 3)))
_MARKERS = ("o", "s", "^")
"""Markers of the first eight series of a scatter chart, the next eight, and so on."""
_MAX_POINTS = 1000
_POINTS_PER_INCH = 72
_SETTINGS = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": _SOFT,
    "axes.labelcolor": _SOFT,
    "axes.edgecolor": _SOFT,
    "axes.titlecolor": _SOFT,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "grid.linewidth": 1,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "ytick.left": False,
    "ytick.minor.left": False,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "legend.borderaxespad": 0,
}
_LOAD_EDGES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
_LOAD_LABELS = ("below 0.25", "0.25", "0.5", "0.8 to 1.25", "1.25", "2", "above 4")
_LOAD_SHADES = (
    *((_CURVES[0], 1.0), (_CURVES[0], 0.6), (_CURVES[0], 0.3)),
    *((_RULE, 0.6), (_CURVES[1], 0.3), (_CURVES[1], 0.6), (_CURVES[1], 1.0)),
)
"""Color and opacity of each level of load, from below the first edge to above the last."""
_SHOWN_UNDERSCORE = "\N{ZERO WIDTH SPACE}"
_MAX_LAYERS = 8
_CELL = 66
"""Width of an image of a grid, with the gap beside it, in pixels."""


class Chart:
    """Data that a matplotlib figure shows. A report keeps the charts of this file, and the picture of any other."""

    description: str
    """Text for readers that do not see the chart."""

    def draw(self, figure: Any) -> None:
        """Draw the chart into a matplotlib figure."""
        raise NotImplementedError

    def choose_height(self, width: int) -> int:
        """Return the height of the chart at a width, in pixels."""
        ratio = 0.46 if width > 600 else 0.75
        return round(ratio * width)


@dataclasses.dataclass(frozen=True)
class Curve:
    """A series of values: a line with a dot per value, only a line, or with `smooth` a moving average over faint
    values."""

    label: str
    x: Sequence[float | int]
    values: Sequence[float | int]
    smooth: bool = False
    dots: bool = True


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
        axes = figure.add_subplot()
        data = [(curve, *_drop_nonfinite(curve)) for curve in self.curves]
        data = [(curve, x, values) for curve, x, values in data if len(values)]
        for number, (curve, x, values) in enumerate(data):
            _draw_curve(axes, number, curve, x, values)
        for label, value in self._baselines.items():
            axes.axhline(value, color=_SOFT, linestyle=(0, (5, 4)), linewidth=1)
            place = {"xy": (1, value), "xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
            axes.annotate(f"{label} {value:.3f}", xytext=(-2, 4), ha="right", **place)
        if data:
            self._set_limits(axes, data)
        _label_axes(figure, axes, self)
        ticks = max(int(figure.get_figwidth() * _POINTS_PER_INCH) // 90, 3)
        axes.locator_params(axis="x", integer=True, nbins=ticks)

    @property
    def _baselines(self) -> dict[str, float]:
        numbers = {label: float(value) for label, value in self.baselines.items()}
        return {label: value for label, value in numbers.items() if math.isfinite(value)}

    def _set_limits(self, axes: Any, data: Sequence[tuple[Curve, np.ndarray, np.ndarray]]) -> None:
        everything = np.concatenate([values for _, _, values in data])
        last = max(float(x[-1]) for _, x, _ in data)
        axes.set_xlim(0, 1.01 * max(last, 1.0))
        if self.log and everything.min() > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(_format_plain)
            axes.yaxis.set_minor_formatter("")
            if everything.max() < 100 * everything.min():
                axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
            return
        is_cut = len(everything) > 50 and any(curve.smooth for curve, _, _ in data)
        if is_cut:
            high = float(np.quantile(everything, 0.97))
        else:
            high = float(everything.max())
        low = min([float(everything.min()), high, *self._baselines.values()])
        high = max([high, *self._baselines.values()])
        margin = 0.06 * (max(high - low, 1e-6 * abs(high)) or 1.0)  # a flat curve still needs a height
        axes.set_ylim(low - margin, high + margin)


@dataclasses.dataclass(frozen=True)
class ScatterChart(Chart):
    """Values of each series in `unit` over a logarithmic x axis: cost against quality. The y axis starts at 0, unless
    `from_zero` is False.

    Values that are not finite are skipped. **Raises** `ValueError` for an x that is not positive.
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
        axes = figure.add_subplot()
        axes.set_xscale("log", base=2)
        for number, curve in enumerate(self.curves):
            marker = _MARKERS[number // len(_CURVES) % len(_MARKERS)]
            style = {"marker": marker, "markersize": 7, "markeredgecolor": _PAPER, "linestyle": "-"}
            style["color"] = _CURVES[number % len(_CURVES)]
            axes.plot(*_drop_nonfinite(curve), label=_format_label(curve.label), **style)
        if self.from_zero:
            axes.set_ylim(bottom=0)
        _label_axes(figure, axes, self)
        axes.xaxis.set_major_formatter(_format_binary)


@dataclasses.dataclass(frozen=True)
class LoadChart(Chart):
    """Load of the experts of each layer over time, a row per expert.

    `counts` are tokens per expert. They are divided by their mean over the experts of a layer, so 1 is perfect balance.
    At most eight layers are shown, the first and the last among them.
    """

    label: str
    x: Sequence[float | int]
    counts: Float[np.ndarray, "times layers experts"]
    x_label: str = "steps"

    @property
    def description(self) -> str:
        largest = self._ratios[-1].max()
        return (
            f"{self.label}: multiple of an even share against {self.x_label}; the largest is {largest:.2f} at the end"
        )

    @property
    def _ratios(self) -> np.ndarray:
        counts = np.asarray(self.counts, np.float64)
        mean = counts.mean(-1, keepdims=True)
        return np.divide(counts, mean, out=np.ones(counts.shape), where=mean > 0)

    @property
    def _layers(self) -> list[int]:
        """The layers that are shown."""
        count = np.shape(self.counts)[1]
        return sorted({round(place) for place in np.linspace(0, count - 1, min(count, _MAX_LAYERS))})

    def choose_height(self, width: int) -> int:
        return 80 + 80 * len(self._layers)

    def draw(self, figure: Any) -> None:
        panels = figure.subplots(len(self._layers), 1, sharex=True, squeeze=False)[:, 0]
        levels = np.digitize(self._ratios, _LOAD_EDGES)
        edges = np.array([0.0, *self.x])
        for axes, layer in zip(panels, self._layers, strict=True):
            for expert in range(levels.shape[2]):
                for level, spans in _find_spans(levels[:, layer, expert], edges).items():
                    color, opacity = _LOAD_SHADES[level]
                    axes.broken_barh(spans, (expert, 1), facecolor=color, alpha=opacity, linewidth=0)
            axes.set_ylim(levels.shape[2], 0)
            axes.set_yticks([levels.shape[2] / 2], [f"layer {layer + 1}"])
            axes.grid(visible=False)
        for (color, opacity), label in zip(_LOAD_SHADES, _LOAD_LABELS, strict=True):
            panels[0].plot([], [], linestyle="none", marker="s", color=color, alpha=opacity, label=label)
        panels[0].set_title(self.label)
        panels[-1].set_xlim(0, edges[-1])
        panels[-1].set_xlabel(self.x_label)
        panels[-1].xaxis.set_major_formatter(_format_count)
        _label_curves(figure, panels[:1])


@dataclasses.dataclass(frozen=True)
class ImageGrid(Chart):
    """Grayscale images row by row, each below its caption; a frame marks the images that were `missed`.

    Intensities are from 0, the color of the page, to 1, the color of its ink. **Raises** `ValueError` for no images,
    and unless each image has one caption and one mark.
    """

    images: Float[np.ndarray, "count height width"]
    captions: Sequence[str]
    missed: Sequence[bool]
    description: str

    def __post_init__(self) -> None:
        if not len(self.images) == len(self.captions) == len(self.missed) > 0:
            counts = f"{len(self.images)} images, {len(self.captions)} captions and {len(self.missed)} marks"
            raise ValueError(f"{counts}: each image has one caption and one mark")

    def choose_height(self, width: int) -> int:
        return (_CELL + 18) * math.ceil(len(self.images) / (width // _CELL))

    def draw(self, figure: Any) -> None:
        columns = int(figure.get_figwidth() * _POINTS_PER_INCH) // _CELL
        grid = list(figure.subplots(math.ceil(len(self.images) / columns), columns, squeeze=False).flat)
        for axes in grid:
            axes.axis("off")
        for axes, image, caption, is_missed in zip(grid, self.images, self.captions, self.missed, strict=False):
            opacity = np.clip(np.asarray(image, np.float64), 0, 1)
            ink = np.zeros((*opacity.shape, 3))  # black, which the page's style inverts where it is dark
            axes.imshow(np.concatenate([ink, opacity[..., None]], -1), interpolation="nearest")
            axes.set_title(caption, loc="center", fontsize=10)
            if is_missed:
                height, width = opacity.shape
                axes.plot(*_outline((-0.5, -0.5), width, height), color=_CURVES[1], linewidth=2, clip_on=False)


@dataclasses.dataclass(frozen=True)
class Picture(Chart):
    """SVG that was drawn elsewhere, wide and narrow, such as `zoo.tools.draw.draw_schedule` returns."""

    wide: str
    narrow: str

    @classmethod
    def of(cls, draw: Callable[..., str]) -> "Picture":
        """Draw both pictures by `draw(width=...)`."""
        return cls(draw(width=860), draw(width=400))


_KINDS = (LineChart, ScatterChart, LoadChart, ImageGrid, Picture)


def draw_svg(chart: Chart, *, width: int) -> str:
    """Draw a chart as an `<svg>` element of this width, in pixels, colored by variables of the page.

    **Raises** `ImportError` without matplotlib, except for a `Picture`.
    """
    if isinstance(chart, Picture):
        return chart.wide if width > 600 else chart.narrow
    matplotlib = import_optional("matplotlib", INSTALL)
    figure_module = import_optional("matplotlib.figure", INSTALL)
    height = chart.choose_height(width)
    description = escape_controls(chart.description)
    salt = f"{description} {width}"  # charts of one page must not share the names of their parts
    with matplotlib.rc_context(_SETTINGS | {"svg.hashsalt": salt}):
        size = (width / _POINTS_PER_INCH, height / _POINTS_PER_INCH)
        figure = figure_module.Figure(figsize=size, layout="constrained")
        chart.draw(figure)
        for words in figure.findobj(lambda artist: hasattr(artist, "set_text")):  # names of metrics and of runs
            words.set_text(escape_controls(words.get_text(), keep=f"\n{_SHOWN_UNDERSCORE}"))
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _inline_svg(file.getvalue(), description)


def dump_chart(chart: Chart) -> dict[str, Any]:
    """Return a chart as JSON objects, for `load_chart`. For a chart of your own, its pictures are kept."""
    if type(chart) not in _KINDS:
        chart = Picture.of(functools.partial(draw_svg, chart))
    return {"kind": type(chart).__name__, **to_jsonable(chart)}


def load_chart(values: Mapping[str, Any]) -> Chart:
    """Return the chart of `dump_chart`'s objects."""
    fields = dict(values)
    kind = {kind.__name__: kind for kind in _KINDS}[fields.pop("kind")]
    for name in {"counts", "images"} & fields.keys():
        fields[name] = np.asarray(fields[name], np.float64)
    if "curves" in fields:
        fields["curves"] = [Curve(**curve) for curve in fields["curves"]]
    return kind(**fields)


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


def _draw_curve(axes: Any, number: int, curve: Curve, x: np.ndarray, values: np.ndarray) -> None:
    color = _CURVES[number % len(_CURVES)]
    thin = slice(None, None, math.ceil(len(x) / _MAX_POINTS))
    style = {
        "color": color,
        "linestyle": _STYLES[number % len(_STYLES)],
        "label": _format_label(curve.label),
        "linewidth": 2,
    }
    if curve.smooth:
        axes.plot(x[thin], values[thin], color=color, alpha=0.3, linewidth=1)
        axes.plot(x[thin], smooth_values(values)[thin], **style)
    elif curve.dots:
        axes.plot(x[thin], values[thin], marker="o", markersize=6, markeredgecolor=_PAPER, **style)
    else:
        axes.plot(x[thin], values[thin], **style)


def _format_label(label: str) -> str:
    """Return a label that matplotlib shows: it hides labels that begin with an underscore."""
    if label.startswith("_"):
        return f"{_SHOWN_UNDERSCORE}{label}"
    return label


def _label_axes(figure: Any, axes: Any, chart: LineChart | ScatterChart) -> None:
    axes.set_title(chart.unit)
    axes.set_xlabel(chart.x_label)
    axes.xaxis.set_major_formatter(_format_count)
    if not axes.lines:
        axes.annotate("no values were logged", (0.5, 0.5), xycoords="axes fraction", ha="center")
    _label_curves(figure, [axes])


def _label_curves(figure: Any, panels: Iterable[Any]) -> None:
    """Draw the labels above the chart, in as many columns as fit."""
    entries = [axes.get_legend_handles_labels() for axes in panels]
    handles = [handle for found, _ in entries for handle in found]
    labels = [label for _, found in entries for label in found]
    if any(labels):
        room = figure.get_figwidth() * _POINTS_PER_INCH
        columns = max(int(room // (6.5 * max(map(len, labels)) + 50)), 1)
        figure.legend(handles, labels, loc="outside upper right", ncols=min(columns, len(labels)))


def _find_spans(levels: np.ndarray, edges: np.ndarray) -> dict[int, list[tuple[float, float]]]:
    """Return (start, length) of each run of equal levels, by level."""
    starts = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist(), len(levels)]
    spans: dict[int, list[tuple[float, float]]] = {}
    for start, stop in itertools.pairwise(starts):
        span = (float(edges[start]), float(edges[stop] - edges[start]))
        spans.setdefault(int(levels[start]), []).append(span)
    return spans


def _outline(corner: tuple[float, float], width: int, height: int) -> tuple[list[float], list[float]]:
    left, top = corner
    right = left + width
    bottom = top + height
    return [left, right, right, left, left], [top, top, bottom, bottom, top]


def _drop_nonfinite(curve: Curve) -> tuple[Float[np.ndarray, "points"], Float[np.ndarray, "points"]]:
    x = np.asarray(curve.x, np.float64)
    values = np.asarray(curve.values, np.float64)
    is_finite = np.isfinite(values)
    return x[is_finite], values[is_finite]


def _format_count(value: float, position: int) -> str:
    if value >= 1e6:
        return format_si(value)
    if value >= 1 or value == 0:
        return f"{value:,.0f}"
    return f"{value:g}"


def _format_plain(value: float, position: int) -> str:
    return f"{value:g}"


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


def _inline_svg(text: str, description: str) -> str:
    """Return matplotlib's SVG file as an element of a page: no declarations, no fixed size, colors of the page."""
    _, _, element = text.partition("<svg")
    element = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", element, flags=re.DOTALL)
    element = re.sub(r' xmlns(:\w+)?="[^"]*"', "", element).replace("xlink:href", "href")
    head, _, rest = element.partition(">")
    (box,) = re.findall(r'viewBox="[^"]*"', head)
    for color, name in COLORS.items():
        rest = rest.replace(color, f"var({name})")
    return f'<svg class="chart" {box} role="img" aria-label="{escape(description)}">{rest}'.rstrip()
