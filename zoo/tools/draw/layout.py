"""Picture of a model on a mesh: each parameter of a kind of layer as an array cut into its shards, and what moves.

Sides of an array grow with the logarithm of their sizes. `embed` runs down, all other dims run across, outer dims
first: experts are side by side.
"""

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import PyTree

from zoo._terminal import format_bytes
from zoo.parallel import Mesh

from .._figure import COLORS, INK, POINTS_PER_INCH, draw_svg
from .description import AxisUse, Drawing, DrawnParameter, Group, describe_layout
from .moves import Move

_BLUE, _ORANGE, _GREEN, _PURPLE, _RED, _, _TEAL, _ = COLORS
_AXIS_COLORS = {"pipe": _PURPLE, "data": _GREEN, "fsdp": _ORANGE, "expert": _RED, "context": _TEAL, "tensor": _BLUE}
_SHADES = {"stored": 0.75, "gathered": 0.3, "other": 0.0}
"""Opacity of the ink that fills a shard: device 0 stores it, gathers it before use, or never has it."""
_MARGIN, _LINE, _BAND = 8, 15, 6
_ACROSS, _DOWN, _SHORTEST = 120, 76, 10
"""Length of the longest side across and down, which 65,536 elements have, and of the shortest one."""
_MOST_SHARDS = 4096
_LETTER = 7
"""Pixels of a wide letter: lines are broken, and columns chosen, by their number of letters."""

_Rectangle = tuple[float, float, float, float]
"""Left, top, width and height."""
_Cut = tuple[str, int, bool]
"""A mesh axis that cuts a side, its size, and whether its shards are all-gathered before use."""


def draw_layout(
    model: PyTree,
    mesh: Mesh,
    *,
    title: str = "",
    loss_fn: Callable | None = None,
    batch: Mapping[str, Any] | None = None,
    seq_len: int = 1024,
    width: int = 860,
) -> str:
    """Draw a model on a mesh as a self-contained `<svg>`: parameters in shards, and what moves in a training step.

        model = eqx.filter_eval_shape(make, jax.random.key(0))
        Path("layout.svg").write_text(zoo.tools.draw.draw_layout(model, mesh))

    Nothing is computed: the model may hold shapes, and the mesh devices that this machine does not have. Shards follow
    from the layout. Moves are read off the program: the loss and its gradient are traced.

    - `loss_fn`, `batch`: as for `zoo.value_and_grad`; the batch may hold shapes. By default the loss of a language
      model or an encoder, on one row per device and micro-batch, of `seq_len` tokens.
    - `width`: of the drawing, for which 400 is narrow.

    **Raises** `ValueError` for a size that the mesh does not divide, and the loss's own errors on such a mesh;
    `TypeError` for a model of an unknown kind without `loss_fn` and `batch`; `ImportError` without matplotlib.
    """
    if width < 320:
        raise ValueError(f"a drawing is at least 320 wide, not {width}")
    options = {"loss_fn": loss_fn, "batch": batch, "seq_len": seq_len}
    return render_drawing(describe_layout(model, mesh, title=title, **options), width=width)


def render_drawing(drawing: Drawing, *, width: int = 860) -> str:
    """Render a drawing as a self-contained `<svg>`."""

    def draw(figure: Any) -> None:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        height = _Sheet(axes, drawing.axis_sizes, width).draw(drawing)
        axes.set(xlim=(0, width), ylim=(height, 0))
        figure.set_size_inches(width / POINTS_PER_INCH, height / POINTS_PER_INCH)

    return draw_svg(draw, width=width, height=width, title=f"{drawing.title} on {drawing.mesh}")


class _Sheet:
    """Axes in pixels that are filled from top to bottom."""

    def __init__(self, axes: Any, axis_sizes: Mapping[str, int], width: int):
        self.axes = axes
        self.axis_sizes = axis_sizes
        self.width = width
        self.y: float = _MARGIN

    def draw(self, drawing: Drawing) -> float:
        """Draw everything, and return the height."""
        self._write_heading(f"{drawing.title} on {drawing.mesh}", size=15)
        self._write_lines(_summarize(drawing))
        for axis in drawing.axes:
            self._text(_MARGIN, f"{axis.name} {axis.size} shards {', '.join(axis.shards)}", axis.name)
            self.y += _LINE
            self._write_lines(_format_traffic(axis))
        self._draw_legend()
        for group in drawing.groups:
            self._draw_group(group)
        self._list_moves("moves in all layers", [move for move in drawing.moves if move.in_layers])
        self._list_moves("moves outside of the layers", [move for move in drawing.moves if not move.in_layers])
        return self.y + _MARGIN

    def _text(self, x: float, words: str, axis: str = "", **style: Any) -> None:
        """Write at `x` in the current line; bold in the color of a mesh axis if one is given."""
        if axis:
            style |= {"color": _AXIS_COLORS[axis], "weight": "bold"}
        self.axes.text(x, self.y, words, va="top", **style)

    def _write_heading(self, words: str, size: int = 13) -> None:
        for line in textwrap.wrap(words, round(self.width / (0.65 * size))):
            self._text(_MARGIN, line, size=size, weight="bold")
            self.y += size + 6

    def _write_lines(self, words: str) -> None:
        for line in textwrap.wrap(words, (self.width - 2 * _MARGIN) // _LETTER):
            self._text(_MARGIN, line)
            self.y += _LINE
        self.y += 4

    def _fill(self, rectangles: Sequence[_Rectangle], **style: Any) -> None:
        """Draw rectangles as one path."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)] for x, y, w, h in rectangles]
        if corners:
            path = Path.make_compound_path(*(Path(each, closed=True) for each in corners))
            self.axes.add_patch(PathPatch(path, clip_on=False, **style))

    def _draw_shards(self, kind: str, rectangles: Sequence[_Rectangle]) -> None:
        self._fill(rectangles, facecolor=(0, 0, 0, _SHADES[kind]), edgecolor=INK, linewidth=0.4)

    def _draw_legend(self) -> None:
        x = _MARGIN
        words = {"stored": "stored on device 0", "gathered": "gathered", "other": "on others"}
        for kind, label in words.items():
            self._draw_shards(kind, [(x, self.y, 11, 11)])
            self._text(x + 16, label)
            x += 30 + 6 * len(label)
        self.y += _LINE

    def _draw_group(self, group: Group) -> None:
        """Draw a line, a heading, and the parameters in columns."""
        self._write_rule(group.name)
        words = f"{format_bytes(group.bytes_per_device)} per device"
        if group.layers:
            words = f"{words}; bytes below are of one layer"
        if group.stages > 1:
            words = f"{words}; {len(group.layers) / group.stages:g} layers on each of {group.stages} stages over pipe"
        self._write_lines(words)
        captions = [_caption(parameter) for parameter in group.parameters]
        longest = max(len(words) for lines in captions for words, _ in lines)
        columns = max((self.width - _MARGIN) // max(_LETTER * longest, _ACROSS + 40), 1)
        pitch = (self.width - _MARGIN) / columns
        for start in range(0, len(captions), columns):
            row = list(zip(group.parameters, captions, strict=True))[start : start + columns]
            tall = max(self._draw_parameter(x, _MARGIN + n * pitch) for n, (x, _) in enumerate(row))
            top = self.y + tall + 4
            for n, (_, lines) in enumerate(row):
                self.y = top
                for number, (words, axis) in enumerate(lines):
                    self._text(_MARGIN + n * pitch, words, axis, weight="bold" if number == 0 else "normal")
                    self.y += _LINE
            self.y = top + _LINE * max(len(lines) for _, lines in row) + 8

    def _draw_parameter(self, x: DrawnParameter, left: float) -> float:
        """Draw the shards of a parameter below a band for each axis that cuts it across, to the right of those that cut
        it down, and return the height."""
        down = _find_down(x)
        across = [index for index in range(len(x.shape)) if index not in down]
        columns = self._find_cuts(x, across)
        rows = self._find_cuts(x, down)
        wide = _scale(x, across, _ACROSS)
        high = _scale(x, down, _DOWN)
        left += _BAND * len(rows)
        top = self.y + _BAND * len(columns)
        kinds = {"other": [], "gathered": [], "stored": []}
        across_kinds = _list_kinds(columns)
        down_kinds = _list_kinds(rows)
        if len(across_kinds) * len(down_kinds) > _MOST_SHARDS:
            raise ValueError(
                f"{x.name} has {len(across_kinds) * len(down_kinds):,} shards, and a picture shows up to "
                f"{_MOST_SHARDS:,}: draw a smaller mesh"
            )
        for (row, row_kind), (column, column_kind) in itertools.product(enumerate(down_kinds), enumerate(across_kinds)):
            kind = min(row_kind, column_kind, key=list(kinds).index)
            piece_wide = wide / len(across_kinds)
            piece_high = high / len(down_kinds)
            kinds[kind].append((left + column * piece_wide, top + row * piece_high, piece_wide, piece_high))
        for kind, rectangles in kinds.items():
            self._draw_shards(kind, rectangles)
        for number, (axis, count) in enumerate(_count_pieces(columns), 1):
            bands = [(left + n * wide / count, top - _BAND * number, 0.95 * wide / count, 4) for n in range(count)]
            self._draw_band(axis, bands)
        for number, (axis, count) in enumerate(_count_pieces(rows), 1):
            bands = [(left - _BAND * number, top + n * high / count, 4, 0.95 * high / count) for n in range(count)]
            self._draw_band(axis, bands)
        return top + high - self.y

    def _find_cuts(self, x: DrawnParameter, dims: Sequence[int]) -> list[_Cut]:
        return [
            (axis, self.axis_sizes[axis], axis in x.gathered_axes[dim]) for dim in dims for axis in x.sharded_axes[dim]
        ]

    def _draw_band(self, axis: str, rectangles: Sequence[_Rectangle]) -> None:
        """Draw a band in the color of an axis: the segment of device 0 strong, the others pale."""
        self._fill(rectangles[:1], facecolor=_AXIS_COLORS[axis], linewidth=0)
        self._fill(rectangles[1:], facecolor=_AXIS_COLORS[axis], alpha=0.35, linewidth=0)

    def _list_moves(self, heading: str, moves: Sequence[Move]) -> None:
        """List moves: phase, collective, what moves and bytes; on a narrow sheet in two lines."""
        if not moves:
            return
        self._write_rule(heading)
        is_narrow = self.width < 800
        for move in moves:
            traffic = format_bytes(move.bytes / move.count)
            if move.count > 1:
                traffic = f"{move.count:,} x {traffic}"
            self._text(self.width - _MARGIN, traffic, ha="right")
            self._text(_MARGIN, f"{move.collective} over {' x '.join(move.axes)}", move.axes[-1])
            if is_narrow:
                self.y += _LINE
            self._text(_MARGIN if is_narrow else 330, f"{move.phase}, {move.subject}")
            self.y += _LINE + 4

    def _write_rule(self, words: str) -> None:
        self.y += 8
        line = (_MARGIN, self.y, self.width - 2 * _MARGIN, 0)
        self._fill([line], facecolor="none", edgecolor=INK, alpha=0.3)
        self.y += 8
        self._write_heading(words)


def _summarize(drawing: Drawing) -> str:
    size = format_bytes(drawing.bytes)
    parameters = [parameter for group in drawing.groups for parameter in group.parameters]
    dtypes = " and ".join(dict.fromkeys(parameter.dtype for parameter in parameters if parameter.shape))
    if drawing.num_devices == 1:
        return f"{size} of parameters in {dtypes}, on one device"
    own = format_bytes(drawing.bytes_per_device)
    words = f"{size} of parameters in {dtypes}, {own} on each of {drawing.num_devices:,} devices"
    return f"{words}. Moves are of a training step on {drawing.batch}."


def _format_traffic(axis: AxisUse) -> str:
    return f"{axis.count:,} collectives a step, {format_bytes(axis.bytes)} per device"


def _caption(x: DrawnParameter) -> list[tuple[str, str]]:
    """Return lines and their axes: the name, whether it is frozen, each dim with the axes that shard it, and bytes."""
    words = [word for word in x.name.split(".") if word != "*"]
    if words[0] == "layers":
        words = words[1:]
    if len(words) > 1 and words[-1] == "weight":
        words = words[:-1]
    lines = [(words[0], "")]
    if len(words) > 1:
        lines.append((".".join(words[1:]), ""))
    for dim, size, axes in zip(x.dims, x.shape, x.sharded_axes, strict=True):
        name = "" if dim.isdigit() or not dim else f"{dim} "
        if axes:
            lines.append((f"{name}{size:,} / {', '.join(axes)}", axes[-1]))
        else:
            lines.append((f"{name}{size:,}", ""))
    frozen = "" if x.trainable else ", frozen"
    return [*lines, (f"{format_bytes(x.bytes_per_device)}{frozen}", "")]


def _find_down(x: DrawnParameter) -> list[int]:
    """Return the dim that runs down: `embed`, or the last of several."""
    if "embed" in x.dims:
        return [len(x.dims) - 1 - x.dims[::-1].index("embed")]
    if len(x.dims) < 2:
        return []
    return [len(x.dims) - 1]


def _scale(x: DrawnParameter, dims: Sequence[int], longest: int) -> float:
    """Return the length of a side: logarithmic, between `_SHORTEST` and `longest`."""
    size = math.prod(x.shape[dim] for dim in dims)
    return min(max(_SHORTEST, longest * (math.log2(max(size, 1)) - 2) / 14), longest)


def _count_pieces(cuts: Sequence[_Cut]) -> list[tuple[str, int]]:
    """Return each axis with the number of pieces that it and the axes outside of it make, innermost first."""
    counts = itertools.accumulate((size for _, size, _ in cuts), lambda a, b: a * b)
    return [(axis, count) for (axis, _, _), count in zip(cuts, counts, strict=True)][::-1]


def _list_kinds(cuts: Sequence[_Cut]) -> list[str]:
    """Return the kind of each shard along a side: "stored" on device 0, "gathered" by it, or "other"."""
    kinds = []
    for index in itertools.product(*(range(size) for _, size, _ in cuts)):
        foreign = [is_gathered for number, (_, _, is_gathered) in zip(index, cuts, strict=True) if number]
        if not foreign:
            kinds.append("stored")
        elif all(foreign):
            kinds.append("gathered")
        else:
            kinds.append("other")
    return kinds
