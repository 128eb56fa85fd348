"""Picture of one parameter: an array cut into its shards, with a colored band for each mesh axis that cuts it.

Sides grow with the logarithm of their sizes. `embed` runs down, all other dims run across, outer dims first: experts
are side by side.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape

from zoo._terminal import format_bytes

from .elements import Number, estimate_width, rectangles, spans, text
from .parts import DrawnParameter

_LONGEST_ACROSS, _LONGEST_DOWN, _SHORTEST, _THIN = 120.0, 76.0, 10.0, 10.0
_BAND, _BAND_GAP, _LINE, _DOT = 4.0, 2.0, 13.0, 8.0
_MOST_PIECES = 4096
_DOWN = "embed"

_Cut = tuple[str, int, bool]
"""A mesh axis that cuts a side, its size, and whether its shards are all-gathered before use."""


@dataclasses.dataclass(frozen=True)
class ParameterPicture:
    """The picture of a parameter of the section `section`, and its captions."""

    parameter: DrawnParameter
    section: str
    axis_sizes: Mapping[str, int]

    @property
    def is_number(self) -> bool:
        """Return True for a single number, which is drawn as a dot and a name."""
        return not self.parameter.shape

    @property
    def width(self) -> Number:
        if self.is_number:
            return _DOT + 6 + estimate_width(self._label)
        widths = [estimate_width(self._label, bold=True), estimate_width(self._caption)]
        widths += [estimate_width("".join(words for words, _ in line)) for line in self._dim_lines()]
        return max(self._bands_left + self._across, *widths)

    @property
    def picture_height(self) -> Number:
        if self.is_number:
            return _DOT
        return self._bands_above + self._down

    @property
    def text_height(self) -> Number:
        if self.is_number:
            return 0.0
        return _LINE * (bool(self._label) + 1 + len(self._dim_lines())) + 4

    @property
    def _down_dim(self) -> int | None:
        dims = self.parameter.dims
        if _DOWN in dims:
            return len(dims) - 1 - dims[::-1].index(_DOWN)
        if len(dims) < 2:
            return None
        return len(dims) - 1

    @property
    def _across_dims(self) -> list[int]:
        return [index for index in range(len(self.parameter.dims)) if index != self._down_dim]

    @property
    def _across(self) -> Number:
        sizes = [self.parameter.shape[index] for index in self._across_dims]
        if not sizes:
            return _THIN
        return _scale(math.prod(sizes), _LONGEST_ACROSS)

    @property
    def _down(self) -> Number:
        if self._down_dim is None:
            return _THIN
        return _scale(self.parameter.shape[self._down_dim], _LONGEST_DOWN)

    def _find_cuts(self, dims: Sequence[int]) -> list[_Cut]:
        x = self.parameter
        return [
            (axis, self.axis_sizes[axis], axis in x.gathered_axes[dim]) for dim in dims for axis in x.sharded_axes[dim]
        ]

    @property
    def _cuts_across(self) -> list[_Cut]:
        return self._find_cuts(self._across_dims)

    @property
    def _cuts_down(self) -> list[_Cut]:
        if self._down_dim is None:
            return []
        return self._find_cuts([self._down_dim])

    @property
    def _bands_above(self) -> Number:
        return (_BAND + _BAND_GAP) * len(self._cuts_across)

    @property
    def _bands_left(self) -> Number:
        return (_BAND + _BAND_GAP) * len(self._cuts_down)

    @property
    def _label(self) -> str:
        """The name within the section, without "weight": `query`, `query.bias`, `experts.gate`; "" for a norm."""
        return ".".join(word for word in shorten_name(self.parameter.name).split(".") if word != self.section)

    @property
    def _caption(self) -> str:
        size = format_bytes(self.parameter.bytes_per_device)
        if self.parameter.trainable:
            return size
        return f"{size}, frozen"

    def _dim_lines(self) -> list[list[tuple[str, str]]]:
        """Return a line per dim: its name, its size, and the axes that shard it, in their colors."""
        lines = []
        for dim, size, axes in zip(*self._dims(), strict=True):
            name = "" if dim.isdigit() or not dim else f"{dim} "
            lines.append([(f"{name}{size:,}", ""), *((f" / {axis}", f"strong fill-{axis}") for axis in axes)])
        return lines

    def _dims(self) -> tuple[Sequence[str], Sequence[int], Sequence[tuple[str, ...]]]:
        return self.parameter.dims, self.parameter.shape, self.parameter.sharded_axes

    def describe(self) -> str:
        """Describe the parameter in words, for screen readers and pointers."""
        dims = []
        for dim, size, axes in zip(*self._dims(), strict=True):
            over = f" over {' and '.join(axes)}" if axes else ""
            dims.append(f"{dim} {size:,}{over}")
        parts = [f"{self.parameter.name}: {', '.join(dims) or 'a number'}"]
        parts.append(f"{format_bytes(self.parameter.bytes_per_device)} per device")
        if not any(self.parameter.sharded_axes):
            parts.append("replicated")
        if not self.parameter.trainable:
            parts.append("frozen")
        return "; ".join(parts)

    def draw(self, x: Number, y: Number, row_height: Number) -> list[str]:
        """Draw it with its left edge at x, and its lower edge `row_height` below y; captions follow."""
        base = y + row_height
        if self.is_number:
            dot = rectangles([(x, base - _DOT, _DOT, _DOT)], "piece stored")
            words = text(x + _DOT + 6, base, self._label)
            return [f'<g class="parameter"><title>{escape(self.describe())}</title>', dot, words, "</g>"]
        top = base - self._down
        left = x + self._bands_left
        parts = [f'<g class="parameter"><title>{escape(self.describe())}</title>']
        parts += self._draw_pieces(left, top)
        for number, (axis, positions) in enumerate(_list_bands(self._cuts_across, self._across)):
            at = top - self._bands_above + number * (_BAND + _BAND_GAP)
            parts += _draw_band(axis, [(left + start, at, size, _BAND) for start, size in positions])
        for number, (axis, positions) in enumerate(_list_bands(self._cuts_down, self._down)):
            at = x + number * (_BAND + _BAND_GAP)
            parts += _draw_band(axis, [(at, top + start, _BAND, size) for start, size in positions])
        lines = [*self._dim_lines(), [(self._caption, "")]]
        if self._label:
            lines.insert(0, [(self._label, "name")])
        for number, line in enumerate(lines, 1):
            parts.append(spans(x, base + _LINE * number, line))
        return [*parts, "</g>"]

    def _draw_pieces(self, left: Number, top: Number) -> list[str]:
        """Draw the shards: the one that device 0 stores, the ones that it gathers, and the others."""
        columns = _list_shards(self._cuts_across)
        rows = _list_shards(self._cuts_down)
        if len(columns) * len(rows) > _MOST_PIECES:
            raise ValueError(
                f"{self.parameter.name} has {len(columns) * len(rows):,} shards, and a picture shows up to "
                f"{_MOST_PIECES:,}: draw a smaller mesh"
            )
        found: dict[str, list[tuple[Number, Number, Number, Number]]] = {"other": [], "gathered": [], "stored": []}
        across = _split_side(self._across, len(columns))
        down = _split_side(self._down, len(rows))
        for (row, (y, height)), (column, (x, width)) in itertools.product(
            zip(rows, down, strict=True), zip(columns, across, strict=True)
        ):
            kind = max(row, column, key=("stored", "gathered", "other").index)
            found[kind].append((left + x, top + y, width, height))
        return [element for kind, pieces in found.items() if (element := rectangles(pieces, f"piece {kind}"))]


def shorten_name(name: str) -> str:
    """Shorten the name of a parameter: `attention.query` of `layers.*.attention.query.weight`."""
    words = [word for word in name.split(".") if word != "*"]
    if words[0] == "layers":
        words = words[1:]
    if len(words) > 1 and words[-1] == "weight":
        words = words[:-1]
    return ".".join(words)


def _scale(size: int, longest: Number) -> Number:
    """Return the length of a side: logarithmic, and at most `longest`, which 65,536 elements have."""
    return min(max(_SHORTEST, longest * (math.log2(max(size, 1)) - 2) / 14), longest)


def _split_side(length: Number, count: int) -> list[tuple[Number, Number]]:
    """Return start and length of each of `count` pieces of a side, with gaps between them where there is room."""
    pitch = length / count
    if pitch >= 6:
        gap = 1.5
    elif pitch >= 2.5:
        gap = 0.5
    else:
        gap = 0.0
    pieces = [(number * pitch, pitch - gap) for number in range(count - 1)]
    return [*pieces, ((count - 1) * pitch, pitch)]


def _list_shards(cuts: Sequence[_Cut]) -> list[str]:
    """Return the kind of each shard along a side: "stored" on device 0, "gathered" by it, or "other"."""
    kinds = []
    for index in itertools.product(*(range(size) for _, size, _ in cuts)):
        foreign = [is_gathered for (_, _, is_gathered), number in zip(cuts, index, strict=True) if number]
        if not foreign:
            kinds.append("stored")
        elif all(foreign):
            kinds.append("gathered")
        else:
            kinds.append("other")
    return kinds


def _list_bands(cuts: Sequence[_Cut], length: Number) -> list[tuple[str, list[tuple[Number, Number]]]]:
    """Return for each axis of a side the segments of its band, outermost axis first."""
    bands = []
    count = 1
    for axis, size, _ in cuts:
        count *= size
        bands.append((axis, _split_side(length, count)))
    return bands


def _draw_band(axis: str, segments: Sequence[tuple[Number, Number, Number, Number]]) -> list[str]:
    """Draw a band in the color of an axis: the segment of device 0 strong, the others pale."""
    first, *others = segments
    return [rectangles([first], f"band fill-{axis}"), rectangles(others, f"band rest fill-{axis}")]
