"""SVG pictures of pipeline schedules: one row per stage, time to the right, a box for each pass of a micro-batch."""

from collections.abc import Sequence
from html import escape

from ...parallel.schedule import Timetable, Work

_TITLES = {"gpipe": "GPipe", "1f1b": "1F1B"}
_KINDS = ("forward", "backward")
_LEFT, _RIGHT, _ROW, _BOX = 58.0, 8.0, 26.0, 22.0
_LETTER, _DIGIT = 6.2, 5.8
"""Estimated widths of a character of the legend and of a digit in a box."""

_STYLE = """
.pipeline { --paper: var(--zoo-paper, #ffffff); --ink: var(--zoo-ink, #1b1f24); --soft: var(--zoo-soft, #57606b);
  --line: var(--zoo-line, #b9c0c8); --on: var(--zoo-on, #ffffff); --forward: var(--zoo-own, #2563c9);
  --backward: var(--zoo-moves, #c2500c); --weights: var(--zoo-string, #17733f);
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
@media (prefers-color-scheme: dark) {
  .pipeline { --paper: var(--zoo-paper, #14171b); --ink: var(--zoo-ink, #e6e8eb); --soft: var(--zoo-soft, #a3acb7);
    --line: var(--zoo-line, #4a525c); --on: var(--zoo-on, #10151c); --forward: var(--zoo-own, #6ea8ff);
    --backward: var(--zoo-moves, #ff9a57); --weights: var(--zoo-string, #63c592); }
}
.pipeline text { fill: var(--soft); font-size: 11px; }
.pipeline .head { fill: var(--ink); font-weight: 600; font-size: 14px; }
.pipeline .end { text-anchor: end; }
.pipeline .number { fill: var(--ink); font-size: 9.5px; text-anchor: middle; font-variant-numeric: tabular-nums; }
.pipeline .number.round0 { fill: var(--on); font-weight: 600; }
.pipeline .paper { fill: var(--paper); }
.pipeline .idle { stroke: var(--line); stroke-width: 1; fill: none; }
.pipeline .box { stroke: var(--paper); }
.pipeline .forward { fill: var(--forward); }
.pipeline .backward { fill: var(--backward); }
.pipeline .weights { fill: var(--weights); }
"""


def draw_schedule(table: Timetable, *, width: int = 860) -> str:
    """Draw a timetable of a pipeline as a self-contained `<svg>`: one row per stage, time to the right.

        table = zoo.parallel.Schedule("1f1b").table(stages=4, microbatches=16, rounds=2)
        Path("schedule.svg").write_text(zoo.tools.draw.draw_schedule(table))

    A box is one pass of a micro-batch, and has its number unless it is too narrow. Later rounds are lighter. CSS
    classes of a box: `box`, `forward` or `backward`, and `round0` onwards.
    """
    work = table.list_work()
    per_unit = (width - _LEFT - _RIGHT) / table.cost()
    digits = len(str(table.microbatches - 1))
    # Boxes of a pixel would otherwise be all outline.
    outline = min(0.6, 0.1 * per_unit * min(x.duration for x in work))
    subtitle = _describe(table)
    lines = _wrap(subtitle, width)
    legend, top = _draw_legend(table.rounds, width, 30.0 + 15 * len(lines))
    height = top + _ROW * table.stages + 6
    title = f"{_TITLES[table.name]}: {table.bubble:.1%} idle"
    description = f"{', '.join(subtitle)}. One row per stage, time to the right."
    parts = [
        f'<svg class="pipeline" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(description)}</desc>",
        f"<style>{_STYLE}{_shade_rounds(table.rounds)}</style>",
        f'<rect class="paper" width="{width}" height="{height:g}"/>',
        _text(8, 19, title, "head"),
        *(_text(8, 36 + 15 * number, line) for number, line in enumerate(lines)),
        *legend,
    ]
    for stage in range(table.stages):
        y = top + _ROW * stage
        parts.append(
            f'<g class="stage" stroke-width="{outline:.2f}">{_text(_LEFT - 8, y + 15, f"stage {stage}", "end")}'
        )
        parts.append(f'<path class="idle" d="M{_LEFT:g} {y + _BOX + 2:g}H{width - _RIGHT:g}"/>')
        parts += [_draw_box(x, per_unit, y, digits) for x in work if x.stage == stage]
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _describe(table: Timetable) -> list[str]:
    """Return the parts of the line below the title."""
    sizes = f"{table.stages} stages, {table.microbatches} micro-batches"
    if table.rounds > 1:
        sizes += f", {table.rounds} rounds"
    return [sizes, "in lockstep"]


def _draw_box(work: Work, per_unit: float, y: float, digits: int) -> str:
    x = _LEFT + work.start * per_unit
    width = work.duration * per_unit
    classes = f"{work.kind} round{work.round}"
    box = f'<rect class="box {classes}" x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{_BOX:g}"/>'
    if width < _DIGIT * digits + 3:
        return box
    return box + _text(x + width / 2, y + 14.5, str(work.microbatch), f"number round{work.round}")


def _draw_legend(rounds: int, width: int, y: float) -> tuple[list[str], float]:
    """Return the legend, and where it ends."""
    entries = [(kind, [(kind, 0)]) for kind in _KINDS]
    if rounds > 1:
        entries.append((f"rounds 0 to {rounds - 1}", [(_KINDS[0], number) for number in range(rounds)]))
    parts = []
    x = 8.0
    y += 4
    for label, samples in entries:
        wide = 13 * len(samples) + 6 + _LETTER * len(label)
        if x > 8 and x + wide > width:
            x = 8.0
            y += 18
        for kind, number in samples:
            parts.append(f'<rect class="sample {kind} round{number}" x="{x:g}" y="{y:g}" width="12" height="12"/>')
            x += 13
        parts.append(_text(x + 4, y + 10, label))
        x += wide - 13 * len(samples) + 16
    return parts, y + 24


def _wrap(words: Sequence[str], width: int) -> list[str]:
    """Join parts by commas into lines of this width."""
    lines = [words[0]]
    for part in words[1:]:
        if 8 + _LETTER * len(f"{lines[-1]}, {part}") > width:
            lines.append(part)
        else:
            lines[-1] += f", {part}"
    return lines


def _shade_rounds(rounds: int) -> str:
    """Return the style of later rounds: light enough for dark numbers on a light background, and the reverse."""
    shades = [max(0.5 * 0.7 ** (number - 1), 0.12) for number in range(1, rounds)]
    return "".join(f".pipeline rect.round{n + 1} {{ fill-opacity: {shade:.2f}; }}\n" for n, shade in enumerate(shades))


def _text(x: float | int, y: float | int, words: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{x:.2f}" y="{y:g}">{escape(words)}</text>'
