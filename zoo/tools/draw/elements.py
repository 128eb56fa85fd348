"""SVG elements, estimated widths of text, colors and icons of the drawings."""

from collections.abc import Iterable
from html import escape

Number = float | int
"""A coordinate or a length."""

COLORS = {
    "pipe": ("#8a3ab0", "#cf9df0"),
    "data": ("#17733f", "#63c592"),
    "fsdp": ("#b4470a", "#ff9a57"),
    "expert": ("#b3261e", "#ff8a8a"),
    "context": ("#0b6b7d", "#58c7d8"),
    "tensor": ("#2563c9", "#6ea8ff"),
}
"""Color of each mesh axis, light and dark: text of it is readable on the background."""


def _define_colors(shade: int) -> str:
    lines = (f"--{axis}: {colors[shade]};" for axis, colors in COLORS.items())
    return "\n  ".join(lines)


_AXES = "\n".join(
    f".zoo-layout .fill-{axis} {{ fill: var(--{axis}); }}\n.zoo-layout .line-{axis} {{ stroke: var(--{axis}); }}"
    for axis in COLORS
)

STYLE = f"""
.zoo-layout {{ --paper: var(--zoo-paper, #ffffff); --ink: var(--zoo-ink, #1b1f24); --soft: var(--zoo-soft, #57606b);
  --line: var(--zoo-line, #b9c0c8); --cell: var(--zoo-cell, #f6f7f9); --stored: #46515e; --gathered: #bcc5cf;
  {_define_colors(0)}
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }}
@media (prefers-color-scheme: dark) {{
  .zoo-layout {{ --paper: var(--zoo-paper, #14171b); --ink: var(--zoo-ink, #e6e8eb); --soft: var(--zoo-soft, #a3acb7);
  --line: var(--zoo-line, #4a525c); --cell: var(--zoo-cell, #1f242b); --stored: #b4bfcc; --gathered: #566270;
  {_define_colors(1)} }}
}}
.zoo-layout text {{ fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }}
.zoo-layout .title {{ fill: var(--ink); font-weight: 600; font-size: 16px; }}
.zoo-layout .head {{ fill: var(--ink); font-weight: 600; font-size: 13px; }}
.zoo-layout .name {{ fill: var(--ink); font-weight: 600; font-size: 11px; }}
.zoo-layout .number {{ font-size: 9px; text-anchor: middle; }}
.zoo-layout .number.stored {{ fill: var(--paper); }}
.zoo-layout .strong {{ font-weight: 600; }}
.zoo-layout .end {{ text-anchor: end; }}
.zoo-layout .middle {{ text-anchor: middle; }}
.zoo-layout .paper {{ fill: var(--paper); }}
.zoo-layout .card {{ fill: var(--cell); stroke: var(--line); }}
.zoo-layout .part {{ fill: var(--paper); stroke: var(--line); }}
.zoo-layout .move {{ fill: none; stroke-width: 1.25; }}
.zoo-layout .other {{ fill: var(--paper); stroke: var(--line); stroke-width: 0.75; }}
.zoo-layout .gathered {{ fill: var(--gathered); }}
.zoo-layout .stored {{ fill: var(--stored); }}
.zoo-layout .icon {{ fill: none; stroke-width: 1.5; stroke-linecap: round; stroke-linejoin: round; }}
.zoo-layout .chevron {{ fill: none; stroke: var(--soft); stroke-width: 1.75; stroke-linecap: round; }}
.zoo-layout .rest {{ opacity: 0.35; }}
{_AXES}
"""

ICONS = {
    "all-reduce": "M11.5 2.5H3L7.5 7L3 11.5H11.5",
    "all-gather": "M1 2H4V5H1ZM1 9H4V12H1ZM8 2H12.5V12H8ZM5 3.5L7 5.5M5 10.5L7 8.5",
    "reduce-scatter": "M1.5 2H6V12H1.5ZM10 2H13V5H10ZM10 9H13V12H10ZM7 5.5L9 3.5M7 8.5L9 10.5",
    "all-to-all": "M1.5 3L12 11M1.5 11L12 3M8.5 2.5L12 3L11.3 6.3M8.5 11.5L12 11L11.3 7.7",
    "permute": "M1.5 9.5C3.5 2.5 10 2.5 12 8.5M8.7 7.2L12 8.7L13.3 5.3",
}
"""Path of each collective's icon, 14 by 14: a sum, shards into one array, one into shards, an exchange, a hop."""
ARROWS = {
    "forward": "M3.5 1V12M0.5 8.8L3.5 12L6.5 8.8",
    "backward": "M3.5 13V2M0.5 5.2L3.5 2L6.5 5.2",
    "update": "M0.5 7A3 3 0 1 1 3.5 10M3.5 10L6 8.2M3.5 10L5.6 12.4",
}
"""Path of the arrow of each phase of a step, 7 by 14: down the layers, up again, and once more around."""


def estimate_width(words: str, size: Number = 11, *, bold: bool = False) -> float:
    """Estimate the width of a text, in the wide letters of fonts that may stand in for the system's."""
    narrow = sum(character in "iljtfr.,:;'|!() " for character in words)
    wide = sum(character in "mwMWGOQ%@" for character in words)
    width = size * (0.625 * (len(words) - narrow - wide) + 0.37 * narrow + 0.95 * wide)
    if bold:
        width *= 1.11
    return width


def format_number(x: Number) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")


def rect(x: Number, y: Number, width: Number, height: Number, kind: str = "", radius: Number = 0) -> str:
    numbers = zip(("x", "y", "width", "height"), map(format_number, (x, y, width, height)), strict=True)
    corner = f' rx="{format_number(radius)}"' if radius else ""
    return f"<rect {' '.join(f'{name}={chr(34)}{value}{chr(34)}' for name, value in numbers)}{corner}{_class(kind)}/>"


def text(x: Number, y: Number, words: str, kind: str = "") -> str:
    return f'<text x="{format_number(x)}" y="{format_number(y)}"{_class(kind)}>{escape(words)}</text>'


def spans(x: Number, y: Number, parts: Iterable[tuple[str, str]], kind: str = "") -> str:
    """Return a line of text whose parts have CSS classes of their own."""
    inner = "".join(_span(words, own) for words, own in parts)
    return f'<text x="{format_number(x)}" y="{format_number(y)}"{_class(kind)}>{inner}</text>'


def _span(words: str, kind: str) -> str:
    if not kind:
        return escape(words)
    return f"<tspan{_class(kind)}>{escape(words)}</tspan>"


def path(d: str, kind: str, x: Number = 0, y: Number = 0) -> str:
    if x or y:
        move = f' transform="translate({format_number(x)} {format_number(y)})"'
    else:
        move = ""
    return f'<path{move} d="{d}"{_class(kind)}/>'


def rectangles(bounds: Iterable[tuple[Number, Number, Number, Number]], kind: str) -> str:
    """Return one path of many rectangles, each x, y, width and height; "" of none."""
    numbers = (map(format_number, each) for each in bounds)
    d = "".join(f"M{x} {y}h{width}v{height}H{x}z" for x, y, width, height in numbers)
    if not d:
        return ""
    return path(d, kind)


def _class(kind: str) -> str:
    kind = kind.strip()
    return f' class="{kind}"' if kind else ""
