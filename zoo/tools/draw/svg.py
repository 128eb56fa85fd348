"""SVG of a drawing: devices, a card per kind of layer with its parameters in pieces, and arrows for moves."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from jaxtyping import PyTree

from zoo._terminal import escape_controls, format_bytes
from zoo.parallel import Mesh

from .cards import GAP, MARGIN, caption_move, draw_group, draw_step_moves, list_drawn, name_group, name_move
from .description import describe_layout
from .device_grid import draw_device_grid
from .elements import ARROWS, STYLE, Number, estimate_width, path, rect, spans, text
from .parts import AxisUse, Drawing


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
        Path("layout.svg").write_text(zoo.tools.draw.draw_layout(model, mesh))

    Nothing is computed: the model may hold shapes, and the mesh devices that this machine does not have. Shards follow
    from the layout. Moves are read off the program: the loss and its gradient are traced.

    - `loss_fn`, `batch`: as for `zoo.value_and_grad`; the batch may hold shapes. By default the loss of a language
      model or an encoder, on one row per device and micro-batch, of `seq_len` tokens.
    - `width`: of the drawing, for which 400 is narrow.

    **Raises** `ValueError` for a size that the mesh does not divide, and the loss's own errors on such a mesh;
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
        parts, height = draw_group(group, drawing, y, width)
        body += parts
        y += height + GAP
    if moves := list_drawn(drawing.moves):
        parts, height = draw_step_moves(moves, y, width)
        body += parts
        y += height + GAP
    height = y - GAP + MARGIN
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
            yield f"{name_group(group)}, {move.phase}: {name_move(move)}, {caption_move(move)}."


def _summarize_bytes(drawing: Drawing) -> str:
    size = format_bytes(drawing.bytes)
    own = format_bytes(drawing.bytes_per_device)
    dtypes = " and ".join(dict.fromkeys(parameter.dtype for parameter in drawing.parameters if parameter.shape))
    if drawing.num_devices == 1:
        return f"{size} of parameters in {dtypes}, on one device"
    return f"{size} of parameters in {dtypes}, {own} on each of {drawing.num_devices:,} devices"


def _draw_header(drawing: Drawing, title: str, width: int) -> tuple[list[str], Number]:
    """Return title, devices and legend, and where they end."""
    lines = _wrap_parts([title], 16, width, bold=True)
    parts = [text(MARGIN, 24 + 20 * number, line, "title") for number, line in enumerate(lines)]
    y = 24 + 20 * len(lines)
    second = [_summarize_bytes(drawing)]
    if drawing.batch:
        second.append(f"moves are those of a training step on {drawing.batch}")
        second.append("bytes of a parameter are those on a device, in all layers of its card")
    for line in _wrap_parts(second, 11, width):
        parts.append(text(MARGIN, y, line))
        y += 16
    if not drawing.axes:
        return parts, y + 4
    y += 4
    beside = width >= 640
    grid_width = 250 if beside else width - 2 * MARGIN
    grid, height = draw_device_grid(drawing.axis_sizes, MARGIN, y, grid_width)
    parts += grid
    if beside:
        left = 300.0
        top = y + 10
    else:
        left = MARGIN
        top = y + height + 22
    legend, end = _draw_legend(drawing, left, top, width)
    return [*parts, *legend], max(y + height, end) + 16


def _draw_legend(drawing: Drawing, x: Number, y: Number, width: int) -> tuple[list[str], Number]:
    parts = []
    for axis in drawing.axes:
        parts.append(rect(x, y - 9, 11, 11, f"fill-{axis.name}", 2))
        words = [(f"{axis.name} {axis.size}", f"strong fill-{axis.name}"), (" shards " + ", ".join(axis.shards), "")]
        used = x + 18
        lines = _wrap_words("".join(words for words, _ in words), width - used - MARGIN)
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
    if kinds:
        entries.append(("gathered", "gathered before use"))
    entries.append(("other", "on other devices"))
    at = x
    for kind, words in entries:
        wide = 20 + estimate_width(words) + 14
        if at > x and at + wide > width - MARGIN:
            at = x
            y = y + 17
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


def _wrap_parts(parts: Sequence[str], size: Number, width: Number, *, bold: bool = False) -> list[str]:
    """Return lines of text, of which each part begins a new one unless it fits behind the one before."""
    lines: list[str] = []
    for part in parts:
        if lines and estimate_width(f"{lines[-1]}; {part}", size, bold=bold) <= width - 2 * MARGIN:
            lines[-1] = f"{lines[-1]}; {part}"
        else:
            lines += _wrap_words(part, width - 2 * MARGIN, size, bold=bold)
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
