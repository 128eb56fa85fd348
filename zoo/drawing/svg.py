"""SVG of a drawing: devices, a card per kind of layer with its parameters in pieces, and arrows for what moves."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from jaxtyping import PyTree

from zoo._terminal import escape_controls, format_bytes
from zoo.inspect.implementations import format_ranges
from zoo.parallel import Mesh

from .description import describe_layout
from .device_grid import draw_device_grid
from .elements import ARROWS, ICONS, STYLE, Number, estimate_width, path, rect, rectangles, spans, text
from .parameter import ParameterPicture
from .parts import AxisUse, Drawing, Group, Move, Section

_MARGIN, _PAD, _GAP, _BETWEEN = 12.0, 12.0, 14.0, 22.0
"""Around the drawing, inside a card, between cards, and between the sections of a card, with an arrow."""
_MOVE_HEIGHT = 34.0
_SMALLEST_MOVE = 64
"""Bytes of one execution below which a move, of single numbers, is not drawn."""


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
    """Draw a model on a mesh as a self-contained `<svg>`: devices, parameters in shards, and what moves in a step.

        model = eqx.filter_eval_shape(make, jax.random.key(0))
        Path("layout.svg").write_text(zoo.drawing.draw_layout(model, mesh))

    Nothing is computed: the model may hold shapes, and the mesh devices that are not there. Shards follow from the
    layout. What moves is read off the program: the loss and its gradient are traced.

    - `loss_fn`, `batch`: those of `zoo.value_and_grad`; the batch may hold shapes. By default the loss of a language
      model or an encoder, on one row per device and micro-batch, of `seq_len` tokens.
    - `width`: of the drawing, for which 400 is narrow.

    **Raises** `ValueError` for a size that the mesh does not divide, and what the loss raises on such a mesh;
    `TypeError` for a model of an unknown kind without `loss_fn` and `batch`.
    """
    options = {"loss_fn": loss_fn, "batch": batch, "seq_len": seq_len}
    return render_drawing(describe_layout(model, mesh, title=title, **options), width=width)


def render_drawing(drawing: Drawing, *, width: int = 860) -> str:
    """Render a drawing as a self-contained `<svg>`, light or dark as its page. **Raises** `ValueError` for a `width`
    below 320."""
    if width < 320:
        raise ValueError(f"a drawing is at least 320 wide, not {width}")
    title = f"{escape_controls(drawing.title)} on {drawing.mesh}"
    body, y = _draw_header(drawing, title, width)
    for group in drawing.groups:
        parts, height = _draw_group(group, drawing, y, width)
        body += parts
        y += height + _GAP
    if moves := _list_drawn(drawing.moves):
        parts, height = _draw_step_moves(moves, y, width)
        body += parts
        y += height + _GAP
    height = y - _GAP + _MARGIN
    head = f'<svg class="zoo-layout" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" role="img">'
    return "\n".join(
        [
            head,
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(' '.join(_describe(drawing)))}</desc>",
            f"<style>{STYLE}</style>",
            rect(0, 0, width, height, "paper"),
            *body,
            "</svg>",
            "",
        ]
    )


def _describe(drawing: Drawing) -> Iterable[str]:
    """Describe a drawing in words, for screen readers."""
    yield f"{_summarize_bytes(drawing)}."
    for axis in drawing.axes:
        yield f"{axis.name} {axis.size} shards {', '.join(axis.shards) or 'nothing'}: {_format_traffic(axis)}."
    for group in drawing.groups:
        for move in [*group.moves, *(move for section in group.sections for move in section.moves)]:
            yield f"{_name_group(group)}, {move.phase}: {_name_move(move)}, {_caption_move(move)}."


def _summarize_bytes(drawing: Drawing) -> str:
    size, own = format_bytes(drawing.bytes), format_bytes(drawing.bytes_per_device)
    dtypes = " and ".join(dict.fromkeys(parameter.dtype for parameter in drawing.parameters))
    if drawing.num_devices == 1:
        return f"{size} of parameters in {dtypes}, on one device"
    return f"{size} of parameters in {dtypes}, {own} on each of {drawing.num_devices:,} devices"


def _draw_header(drawing: Drawing, title: str, width: int) -> tuple[list[str], Number]:
    """Return title, devices and legend, and where they end."""
    lines = _wrap([title], 16, width, bold=True)
    parts = [text(_MARGIN, 24 + 20 * number, line, "title") for number, line in enumerate(lines)]
    y = 24 + 20 * len(lines)
    second = [_summarize_bytes(drawing)]
    if drawing.batch:
        second.append(f"moves are those of a training step on {drawing.batch}")
        second.append("bytes of a parameter are those on a device, in all layers of its card")
    for line in _wrap(second, 11, width):
        parts.append(text(_MARGIN, y, line))
        y += 16
    if not drawing.axes:
        return parts, y + 4
    y += 4
    beside = width >= 640
    grid, height = draw_device_grid(drawing.axis_sizes, _MARGIN, y, 250 if beside else width - 2 * _MARGIN)
    parts += grid
    left, top = (300.0, y + 10) if beside else (_MARGIN, y + height + 22)
    legend, end = _draw_legend(drawing, left, top, width)
    return [*parts, *legend], max(y + height, end) + 16


def _draw_legend(drawing: Drawing, x: Number, y: Number, width: int) -> tuple[list[str], Number]:
    parts = []
    for axis in drawing.axes:
        parts.append(rect(x, y - 9, 11, 11, f"fill-{axis.name}", 2))
        words = [(f"{axis.name} {axis.size}", f"strong fill-{axis.name}"), (" shards " + ", ".join(axis.shards), "")]
        used = x + 18
        lines = _wrap_words("".join(words for words, _ in words), width - used - _MARGIN)
        first = len(words[0][0])
        parts.append(spans(used, y, [words[0], (lines[0][first:], "")]))
        for line in lines[1:]:
            y += 14
            parts.append(text(used, y, line))
        y += 14
        parts.append(text(used, y, _format_traffic(axis)))
        y += 19
    entries = [("stored", "stored on device 0")]
    kinds = {axes for parameter in drawing.parameters for axes in parameter.gathered_axes if axes}
    entries += [("gathered", "gathered before use")] if kinds else []
    entries.append(("other", "on other devices"))
    at = x
    for kind, words in entries:
        wide = 20 + estimate_width(words) + 14
        if at > x and at + wide > width - _MARGIN:
            at, y = x, y + 17
        parts += [rect(at, y - 9, 11, 11, f"sample {kind}"), text(at + 17, y, words)]
        at += wide
    y += 18
    at = x
    for phase, words in (("forward", "forward"), ("backward", "backward"), ("update", "after the backward pass")):
        parts += [path(ARROWS[phase], "chevron", at, y - 11), text(at + 13, y, words)]
        at += 13 + estimate_width(words) + 16
    return parts, y + 4


def _format_traffic(axis: AxisUse) -> str:
    return f"{axis.count:,} collectives a step, {format_bytes(axis.bytes)} per device"


def _name_group(group: Group) -> str:
    return f"{len(group.layers):,} x {group.name}" if group.layers else group.name


def _draw_group(group: Group, drawing: Drawing, y: Number, width: int) -> tuple[list[str], Number]:
    """Draw a card: a header, the moves of parameters, and the sections."""
    left, right = _MARGIN, width - _MARGIN - (8 if len(group.layers) > 1 else 0)
    x, inner = left + _PAD, right - left - 2 * _PAD
    at = y + _PAD + 12
    name = _name_group(group)
    parts = [text(x, at, name, "head")]
    if group.layers:
        numbers = f"layers {format_ranges(group.layers)}" if len(group.layers) > 1 else f"layer {group.layers[0]}"
        parts.append(text(x + estimate_width(name, 13, bold=True) + 10, at, numbers))
    parts.append(text(right - _PAD, at, f"{format_bytes(group.bytes_per_device)} per device", "end"))
    at += 10
    if group.layer_axes:
        stages = [(axis, drawing.axis_sizes[axis]) for axis in group.layer_axes]
        parts += _draw_stages(group, stages, x, at, inner)
        at += 28
    drawn = [section for section in group.sections if section.parameters or _list_drawn(section.moves)]
    moves = _list_drawn(group.moves)
    beside = max(map(_measure_move, moves), default=0) + _BETWEEN
    widths = [_make_box(section, drawing.axis_sizes, inner).width + _BETWEEN for section in drawn]
    if moves and beside + sum(widths) - _BETWEEN <= inner:  # one row of all
        moved, moved_height = _draw_moves(moves, x, at + 2, beside - _BETWEEN)
        elements, height = _draw_sections(drawn, drawing.axis_sizes, x + beside, at, inner - beside)
        parts.append(path("M0 0L5 5L0 10", "chevron", x + beside - 14, at + 14))
        height = max(height, moved_height)
    else:
        moved, moved_height = _draw_moves(moves, x, at + 2, inner)
        at += moved_height + 10 if moves else 0
        elements, height = _draw_sections(drawn, drawing.axis_sizes, x, at, inner)
    height += at + _PAD - y
    sheets = [rect(left + 4 * n, y + 4 * n, right - left, height, "card", 6) for n in (2, 1) if len(group.layers) > 1]
    card = rect(left, y, right - left, height, "card", 6)
    return [*sheets, card, *parts, *moved, *elements], height + (8 if sheets else 0)


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
        is_tied = self.section.name == "head" and not self.section.parameters
        return "head, tied" if is_tied else self.section.name

    @property
    def row_heights(self) -> list[tuple[Number, Number]]:
        """Height of the pictures and of the captions of each row."""
        return [(max(x.picture_height for x in row), max(x.text_height for x in row)) for row in self.rows]

    @property
    def height(self) -> Number:
        rows = sum(picture + captions + 8 for picture, captions in self.row_heights)
        moves = _draw_moves(self.moves, 0, 0, self.width - 20)[1] + 6 if self.moves else 0
        return 26 + rows + moves + (4 if self.moves else 0)


_CELL_GAP = 18.0


def _make_box(section: Section, axis_sizes: Mapping[str, int], width: Number) -> _Box:
    """Lay a section out at most `width` wide."""
    rows: list[list[ParameterPicture]] = []
    used = width
    for picture in (ParameterPicture(x, section.name, axis_sizes) for x in section.parameters):
        if rows and used + _CELL_GAP + picture.width <= width - 20:
            rows[-1].append(picture)
            used += _CELL_GAP + picture.width
        else:
            rows.append([picture])
            used = picture.width
    moves = _list_drawn(section.moves)
    widths = [sum(x.width for x in row) + _CELL_GAP * (len(row) - 1) for row in rows]
    widths.append(estimate_width(section.name, bold=True) + 30)
    wide = [_measure_move(move) for move in moves]
    side_by_side = sum(wide) + 8 * (len(wide) - 1)
    widths.append(side_by_side if side_by_side <= max([0, *widths]) + 130 else max(wide, default=0))
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
    parts, top = [], y
    for line in lines:
        at = x
        for number, box in enumerate(line):
            if number:
                parts.append(path("M0 0L5 5L0 10", "chevron", at - 14, y + 14))
            parts += _draw_box(box, at, y)
            at += box.width + _BETWEEN
        y += max(box.height for box in line) + 10
    return parts, y - top - (10 if lines else 0)


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


def _draw_step_moves(moves: Sequence[Move], y: Number, width: int) -> tuple[list[str], Number]:
    inner = width - 2 * _MARGIN - 2 * _PAD
    elements, height = _draw_moves(moves, _MARGIN + _PAD, y + 34, inner)
    card = rect(_MARGIN, y, width - 2 * _MARGIN, height + 34 + _PAD, "card", 6)
    return [card, text(_MARGIN + _PAD, y + _PAD + 12, "once a step", "head"), *elements], height + 34 + _PAD


def _list_drawn(moves: Iterable[Move]) -> list[Move]:
    return [move for move in moves if move.bytes > _SMALLEST_MOVE * move.count]


def _name_move(move: Move) -> str:
    return f"{move.collective} over {' x '.join(move.axes)}"


def _caption_move(move: Move) -> str:
    traffic = format_bytes(move.bytes / move.count)
    traffic = f"{move.count:,} x {traffic}" if move.count > 1 else traffic
    return f"{move.subject}: {traffic}" if move.subject else traffic


def _measure_move(move: Move) -> Number:
    return 44 + max(estimate_width(_name_move(move), bold=True), estimate_width(_caption_move(move)))


def _draw_moves(moves: Sequence[Move], x: Number, y: Number, width: Number) -> tuple[list[str], Number]:
    """Draw moves side by side where there is room, and return the elements and their height."""
    if not moves:
        return [], 0.0
    parts, at, top = [], x, y
    for move in moves:
        wide = min(_measure_move(move), width)
        if at > x and at + wide > x + width:
            at, y = x, y + _MOVE_HEIGHT + 6
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
        text(x + 38, y + 14, _name_move(move), f"strong fill-{axis}"),
        text(x + 38, y + 27, _caption_move(move)),
        "</g>",
    ]


def _wrap(parts: Sequence[str], size: Number, width: Number, *, bold: bool = False) -> list[str]:
    """Return lines of text, of which each part begins a new one unless it fits behind the one before."""
    lines: list[str] = []
    for part in parts:
        joined = f"{lines[-1]}; {part}" if lines else part
        if lines and estimate_width(joined, size, bold=bold) <= width - 2 * _MARGIN:
            lines[-1] = joined
        else:
            lines += _wrap_words(part, width - 2 * _MARGIN, size, bold=bold)
    return lines


def _wrap_words(words: str, width: Number, size: Number = 11, *, bold: bool = False) -> list[str]:
    lines = [""]
    for word in words.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and estimate_width(joined, size, bold=bold) > width:
            lines.append(word)
        else:
            lines[-1] = joined
    return lines
