"""Picture of a mesh: devices as a grid, with a name, a size and a line along each of its axes."""

import itertools
import math
from collections.abc import Mapping, Sequence

from zoo.parallel.layout import AXES

from .elements import Number, estimate_width, format_number, rect, text

_MOST_DRAWN = (8, 8, 4, 4, 4, 4)
"""Most devices drawn along an axis, innermost axis first; a longer axis continues in dots."""
_GAPS = (2.0, 2.0, 8.0, 8.0, 16.0, 16.0)
_LABEL = 18.0


def draw_device_grid(axis_sizes: Mapping[str, int], x: Number, y: Number, width: Number) -> tuple[list[str], Number]:
    """Draw the devices of a mesh at most `width` wide, and return the elements and their height.

    The innermost axis runs across and the next one down, the third across in blocks of these, and so on.
    """
    axes = [axis for axis in reversed(AXES) if axis_sizes[axis] > 1]
    drawn = [min(axis_sizes[axis], most) for axis, most in zip(axes, _MOST_DRAWN, strict=False)]
    across = range(0, len(axes), 2)
    down = range(1, len(axes), 2)
    left = _LABEL * len(down) + 2
    top = _LABEL * len(across) + 2
    is_cut = [axis_sizes[axis] > count for axis, count in zip(axes, drawn, strict=False)]
    dots = 16.0 if any(is_cut[i] for i in across) else 0.0
    dots_below = 12 if any(is_cut[i] for i in down) else 0
    columns = math.prod(drawn[i] for i in across)
    gaps = _measure(drawn, across, 0.0)
    side = min(24.0, max(4.0, (width - left - dots - gaps) / columns))
    names = {i: estimate_width(f"{axes[i]} {axis_sizes[axes[i]]}", bold=True) for i in down}
    # A name longer than its line sticks out above it.
    top = max([top, *(wide - _measure(drawn, range(1, i + 1, 2), side) for i, wide in names.items())])
    parts = ['<g class="devices">']
    for index in itertools.product(*map(range, drawn)):
        at = [
            sum(index[i] * (_measure(drawn, range(run.start, i, 2), side) + _GAPS[i]) for i in run)
            for run in (across, down)
        ]
        strides = [math.prod(axis_sizes[axis] for axis in axes[:i]) for i in range(len(axes))]
        device = sum(number * stride for number, stride in zip(index, strides, strict=True))
        kind = "other" if device else "stored"
        parts.append(rect(x + left + at[0], y + top + at[1], side, side, f"device {kind}", min(2.0, side / 6)))
        if side >= 14 and estimate_width(str(device), 9) < side - 2:
            middle = (x + left + at[0] + side / 2, y + top + at[1] + side / 2 + 3)
            shade = "" if device else kind
            parts.append(text(*middle, str(device), f"number {shade}"))
    size = [_measure(drawn, run, side) for run in (across, down)]
    parts += _label_axes(axes, axis_sizes, drawn, x, y, left, top, side, size)
    return [*parts, "</g>"], top + max(size[1], side) + dots_below


def _measure(drawn: Sequence[int], run: range, side: Number) -> Number:
    """Return the length of the nested axes of a run, innermost first."""
    length = side
    for i in run:
        length = drawn[i] * length + (drawn[i] - 1) * _GAPS[i]
    return length


def _label_axes(
    axes: Sequence[str],
    axis_sizes: Mapping[str, int],
    drawn: Sequence[int],
    x: Number,
    y: Number,
    left: Number,
    top: Number,
    side: Number,
    size: Sequence[Number],
) -> list[str]:
    parts = []
    for i, axis in enumerate(axes):
        words = f"{axis} {axis_sizes[axis]}"
        length = _measure(drawn, range(i % 2, i + 1, 2), side)
        if i % 2 == 0:
            at = (x + left, y + top - 5 - _LABEL * (i // 2))
            parts += [text(at[0], at[1] - 3, words, f"strong fill-{axis}"), rect(*at, length, 2, f"fill-{axis}")]
            if axis_sizes[axis] > drawn[i]:
                parts.append(text(at[0] + size[0] + 4, y + top + 11, "…", f"strong fill-{axis}"))
        else:
            at = (x + left - 5 - _LABEL * (i // 2), y + top)
            move = f"translate({format_number(at[0] - 3)} {format_number(at[1] + length)}) rotate(-90)"
            parts.append(f'<text transform="{move}" class="strong fill-{axis}">{words}</text>')
            parts.append(rect(*at, 2, length, f"fill-{axis}"))
            if axis_sizes[axis] > drawn[i]:
                parts.append(text(x + left, y + top + size[1] + 10, "…", f"strong fill-{axis}"))
    return parts
