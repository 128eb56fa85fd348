"""Cards of a drawing: a kind of layer, or a part outside of the layers, with its parameters and its moves."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from zoo._terminal import format_bytes
from zoo.inspect.implementations import format_ranges

from .elements import ARROWS, ICONS, Number, estimate_width, path, rect, rectangles, spans, text
from .parameter import ParameterPicture
from .parts import Drawing, Group, Move, Section

MARGIN, GAP, _PAD, _BETWEEN = 12.0, 14.0, 12.0, 22.0
"""Around the drawing, between cards, inside a card, and between the sections of a card, with an arrow."""
_MOVE_HEIGHT = 34.0
_SMALLEST_MOVE = 64
"""Bytes of one execution below which a move, of single numbers, is not drawn."""


def name_group(group: Group) -> str:
    if len(group.layers) > 1:
        return f"{len(group.layers):,} x {group.name}"
    return group.name


def draw_group(group: Group, drawing: Drawing, y: Number, width: int) -> tuple[list[str], Number]:
    """Draw a card: a header, the moves of parameters, and the sections."""
    left = MARGIN
    behind = (2, 1) if len(group.layers) > 1 else ()  # sheets behind the card
    right = width - MARGIN - 4 * len(behind)
    x = left + _PAD
    inner = right - left - 2 * _PAD
    at = y + _PAD + 12
    name = name_group(group)
    parts = [text(x, at, name, "head")]
    if group.layers:
        if len(group.layers) > 1:
            numbers = f"layers {format_ranges(group.layers)}"
        else:
            numbers = f"layer {group.layers[0]}"
        parts.append(text(x + estimate_width(name, 13, bold=True) + 10, at, numbers))
    parts.append(text(right - _PAD, at, f"{format_bytes(group.bytes_per_device)} per device", "end"))
    at += 10
    if group.layer_axes:
        stages = [(axis, drawing.axis_sizes[axis]) for axis in group.layer_axes]
        parts += _draw_stages(group, stages, x, at, inner)
        at += 28
    drawn = [section for section in group.sections if section.parameters or list_drawn(section.moves)]
    moves = list_drawn(group.moves)
    beside = max(map(_measure_move, moves), default=0) + _BETWEEN
    widths = [_make_box(section, drawing.axis_sizes, inner).width + _BETWEEN for section in drawn]
    if moves and beside + sum(widths) - _BETWEEN <= inner:  # one row of all
        moved, moved_height = _draw_moves(moves, x, at + 2, beside - _BETWEEN)
        elements, height = _draw_sections(drawn, drawing.axis_sizes, x + beside, at, inner - beside)
        parts.append(path("M0 0L5 5L0 10", "chevron", x + beside - 14, at + 14))
        height = max(height, moved_height)
    else:
        moved, moved_height = _draw_moves(moves, x, at + 2, inner)
        if moves:
            at += moved_height + 10
        elements, height = _draw_sections(drawn, drawing.axis_sizes, x, at, inner)
    height += at + _PAD - y
    sheets = [rect(left + 4 * n, y + 4 * n, right - left, height, "card", 6) for n in behind]
    card = rect(left, y, right - left, height, "card", 6)
    return [*sheets, card, *parts, *moved, *elements], height + 4 * len(behind)


def _draw_stages(group: Group, stages: Sequence[tuple[str, int]], x: Number, y: Number, width: Number) -> list[str]:
    """Draw the stages that the layers are dealt out to, as a band."""
    parts = []
    for axis, size in stages:
        pitch = width / size
        segments = [(x + n * pitch, y, pitch - 1.5, 5.0) for n in range(size)]
        parts += [rectangles(segments[:1], f"band fill-{axis}"), rectangles(segments[1:], f"band rest fill-{axis}")]
        words = [(f"{len(group.layers):,} layers", ""), (f" / {axis}", f"strong fill-{axis}")]
        words.append((f": {len(group.layers) / size:g} on each of {size} stages", ""))
        parts.append(spans(x, y + 18, words))
    return parts


@dataclasses.dataclass
class _Box:
    """A section as it is drawn: rows of parameters, moves below them."""

    section: Section
    rows: list[list[ParameterPicture]]
    moves: list[Move]
    width: Number

    @property
    def name(self) -> str:
        if self.section.name == "head" and not self.section.parameters:
            return "head, tied"
        return self.section.name

    @property
    def row_heights(self) -> list[tuple[Number, Number]]:
        """Height of the pictures and of the captions of each row."""
        return [(max(x.picture_height for x in row), max(x.text_height for x in row)) for row in self.rows]

    @property
    def height(self) -> Number:
        rows = sum(picture + captions + 8 for picture, captions in self.row_heights)
        height = 26 + rows
        if self.moves:
            height += _draw_moves(self.moves, 0, 0, self.width - 20)[1] + 10
        return height


_CELL_GAP = 18.0


def _make_box(section: Section, axis_sizes: Mapping[str, int], width: Number) -> _Box:
    """Lay a section out at most `width` wide."""
    rows: list[list[ParameterPicture]] = []
    used = width
    pictures = [ParameterPicture(x, section.name, axis_sizes) for x in section.parameters]
    for picture in sorted(pictures, key=lambda picture: picture.is_number):
        same = rows and rows[-1][0].is_number == picture.is_number
        if same and used + _CELL_GAP + picture.width <= width - 20:
            rows[-1].append(picture)
            used += _CELL_GAP + picture.width
        else:
            rows.append([picture])
            used = picture.width
    moves = list_drawn(section.moves)
    widths = [sum(x.width for x in row) + _CELL_GAP * (len(row) - 1) for row in rows]
    widths.append(estimate_width(section.name, bold=True) + 30)
    wide = [_measure_move(move) for move in moves]
    side_by_side = sum(wide) + 8 * (len(wide) - 1)
    if side_by_side <= max([0, *widths]) + 130:
        widths.append(side_by_side)
    else:
        widths += wide
    return _Box(section, rows, moves, min(width, max(widths) + 20))


def _draw_sections(
    sections: Sequence[Section], axis_sizes: Mapping[str, int], x: Number, y: Number, width: Number
) -> tuple[list[str], Number]:
    """Draw sections in reading order, side by side where there is room."""
    lines: list[list[_Box]] = []
    free = 0.0
    for section in sections:
        box = _make_box(section, axis_sizes, width)
        if lines and box.width > free >= 0.7 * width:
            box = _make_box(section, axis_sizes, free)
        if lines and box.width <= free:
            lines[-1].append(box)
        else:
            lines.append([box])
            free = width
        free -= box.width + _BETWEEN
    parts = []
    top = y
    for line in lines:
        at = x
        for number, box in enumerate(line):
            if number:
                parts.append(path("M0 0L5 5L0 10", "chevron", at - 14, y + 14))
            parts += _draw_box(box, at, y)
            at += box.width + _BETWEEN
        y += max(box.height for box in line) + 10
    if lines:
        y -= 10
    return parts, y - top


def _draw_box(box: _Box, x: Number, y: Number) -> list[str]:
    parts = [rect(x, y, box.width, box.height, "part", 4), text(x + 10, y + 17, box.name, "name")]
    at = y + 26
    for row, (pictures, captions) in zip(box.rows, box.row_heights, strict=True):
        left = x + 10
        for picture in row:
            parts += picture.draw(left, at, pictures)
            left += picture.width + _CELL_GAP
        at += pictures + captions + 8
    if box.moves:
        parts += _draw_moves(box.moves, x + 10, at, box.width - 20)[0]
    return parts


def draw_step_moves(moves: Sequence[Move], y: Number, width: int) -> tuple[list[str], Number]:
    inner = width - 2 * MARGIN - 2 * _PAD
    elements, height = _draw_moves(moves, MARGIN + _PAD, y + 34, inner)
    card = rect(MARGIN, y, width - 2 * MARGIN, height + 34 + _PAD, "card", 6)
    return [card, text(MARGIN + _PAD, y + _PAD + 12, "once a step", "head"), *elements], height + 34 + _PAD


def list_drawn(moves: Iterable[Move]) -> list[Move]:
    return [move for move in moves if move.bytes > _SMALLEST_MOVE * move.count]


def name_move(move: Move) -> str:
    return f"{move.collective} over {' x '.join(move.axes)}"


def caption_move(move: Move) -> str:
    traffic = format_bytes(move.bytes / move.count)
    if move.count > 1:
        traffic = f"{move.count:,} x {traffic}"
    if move.subject:
        return f"{move.subject}: {traffic}"
    return traffic


def _measure_move(move: Move) -> Number:
    return 44 + max(estimate_width(name_move(move), bold=True), estimate_width(caption_move(move)))


def _draw_moves(moves: Sequence[Move], x: Number, y: Number, width: Number) -> tuple[list[str], Number]:
    """Draw moves side by side where there is room, and return the elements and their height."""
    if not moves:
        return [], 0.0
    parts = []
    at = x
    top = y
    for move in moves:
        wide = min(_measure_move(move), width)
        if at > x and at + wide > x + width:
            at = x
            y = y + _MOVE_HEIGHT + 6
        parts += _draw_move(move, at, y, wide)
        at += wide + 8
    return parts, y + _MOVE_HEIGHT - top


def _draw_move(move: Move, x: Number, y: Number, width: Number) -> list[str]:
    axis = move.axes[-1]
    return [
        '<g class="arrow">',
        rect(x, y, width, _MOVE_HEIGHT, f"move line-{axis}", 5),
        path(ARROWS[move.phase], f"icon line-{axis}", x + 7, y + 10),
        path(ICONS[move.collective], f"icon line-{axis}", x + 19, y + 10),
        text(x + 38, y + 14, name_move(move), f"strong fill-{axis}"),
        text(x + 38, y + 27, caption_move(move)),
        "</g>",
    ]
