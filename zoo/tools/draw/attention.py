"""SVG pictures of attention patterns: a square per head, with a row per query and a column per key."""

import itertools
import math
from collections.abc import Sequence
from html import escape

import numpy as np
from jaxtyping import Array, Float

_LEVELS = {0.05: 0.14, 0.2: 0.34, 0.4: 0.56, 0.6: 0.78, 0.8: 1.0}
"""Opacity of a cell, by the smallest probability that is drawn with it."""
_GAP, _TITLE, _LETTER, _MARGIN = 20.0, 20.0, 6.2, 2.0
_SMALLEST_LETTER = 9.0
"""Width of a cell from which on tokens are written at the edges, in pixels."""

_STYLE = """
.attention { --ink: var(--zoo-ink, #1b1f24); --soft: var(--zoo-soft, #57606b); --line: var(--zoo-line, #b9c0c8);
  --cell: var(--zoo-cell, #f6f7f9); --own: var(--zoo-own, #2563c9);
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
@media (prefers-color-scheme: dark) {
  .attention { --ink: var(--zoo-ink, #e6e8eb); --soft: var(--zoo-soft, #a3acb7); --line: var(--zoo-line, #4a525c);
    --cell: var(--zoo-cell, #1f242b); --own: var(--zoo-own, #6ea8ff); }
}
.attention text { fill: var(--soft); font-size: 11px; }
.attention .head { fill: var(--ink); font-weight: 600; font-size: 12px; }
.attention .token { fill: var(--ink); font: 10px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  text-anchor: middle; }
.attention rect { fill: var(--own); }
.attention .all { fill: var(--cell); stroke: var(--line); stroke-width: 0.5; }
.attention path { fill: var(--own); }
"""


def draw_attention(
    probabilities: Float[Array, "heads query key"] | Float[np.ndarray, "heads query key"],
    titles: Sequence[str],
    tokens: Sequence[str] = (),
    *,
    width: int = 860,
    columns: int = 4,
) -> str:
    """Draw attention probabilities as a self-contained `<svg>`: a square per head, a row per query, a column per key.

        _, seen = zoo.capture(model, "layers.1.attention.probabilities")(tokens)
        heads = seen["layers.1.attention.probabilities"][0]
        Path("heads.svg").write_text(draw_attention(heads, [f"head {n}" for n in range(len(heads))]))

    - `titles`: one for each head.
    - `tokens`: the text of each token, written at the edges of squares that are large enough: single characters.
    - `width`: of the picture, in pixels; `columns`: squares in a row.

    Darker is more, in five levels; probabilities below 0.05 are not drawn. **Raises** `ValueError` unless each head has
    a title, and each query and key a token if there are any.
    """
    heads = np.asarray(probabilities, np.float32)
    count, queries, keys = heads.shape
    if len(titles) != count or (tokens and {queries, keys} != {len(tokens)}):
        raise ValueError(
            f"{count} heads of {queries} queries and {keys} keys have {len(titles)} titles and {len(tokens)} tokens"
        )
    panel = (width - 2 * _MARGIN - (columns - 1) * _GAP) / columns
    has_tokens = bool(tokens) and (panel - 16) / keys >= _SMALLEST_LETTER
    edge = 16.0 if has_tokens else 0.0
    cell = (panel - edge) / keys
    legend = _draw_levels()
    top = 26.0
    height = top + math.ceil(count / columns) * (_TITLE + edge + cell * queries + _GAP) - _GAP + _MARGIN
    parts = [
        f'<svg class="attention" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.1f}" role="img">',
        f"<title>Attention of {count} heads</title>",
        f"<desc>A row per query, a column per key: {escape(', '.join(titles))}.</desc>",
        f"<style>{_STYLE}</style>",
        *legend,
    ]
    for number, (head, title) in enumerate(zip(heads, titles, strict=True)):
        row, column = divmod(number, columns)
        x = _MARGIN + column * (panel + _GAP)
        y = top + row * (_TITLE + edge + cell * queries + _GAP)
        parts.append(f'<text class="head" x="{x:.1f}" y="{y + 13:.1f}">{escape(title)}</text>')
        x += edge
        y += _TITLE + edge
        if has_tokens:
            parts += _draw_tokens(tokens, x, y, cell)
        parts += [f'<g transform="translate({x:.1f} {y:.1f}) scale({cell:.3f})">', *_draw_cells(head), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _draw_cells(head: Float[np.ndarray, "query key"]) -> list[str]:
    """Return a square of one unit per key, and a path for the cells of each level."""
    queries, keys = head.shape
    outline = f'<rect class="all" width="{keys}" height="{queries}" vector-effect="non-scaling-stroke"/>'
    edges = [*_LEVELS, math.inf]
    parts = [outline]
    for low, high in itertools.pairwise(edges):
        cells = "".join(f"M{key} {query}h1v1h-1z" for query, key in np.argwhere((head >= low) & (head < high)))
        if cells:
            parts.append(f'<path fill-opacity="{_LEVELS[low]}" d="{cells}"/>')
    return parts


def _draw_tokens(tokens: Sequence[str], x: float, y: float, cell: float) -> list[str]:
    """Return the tokens at the left and the upper edge of a square at `x`, `y`."""
    parts = []
    for number, token in enumerate(tokens):
        place = (number + 0.5) * cell
        parts.append(f'<text class="token" x="{x - 8:.1f}" y="{y + place + 3.5:.1f}">{escape(token)}</text>')
        parts.append(f'<text class="token" x="{x + place:.1f}" y="{y - 5:.1f}">{escape(token)}</text>')
    return parts


def _draw_levels() -> list[str]:
    """Return a sample of each level behind the smallest probability that it stands for."""
    parts = []
    x = _MARGIN
    for low, opacity in _LEVELS.items():
        parts.append(f'<rect x="{x:.1f}" y="4" width="11" height="11" fill-opacity="{opacity}"/>')
        label = f"from {low}" if x == _MARGIN else f"{low}"
        parts.append(f'<text x="{x + 15:.1f}" y="13.5">{label}</text>')
        x += 15 + _LETTER * len(label) + 10
    return parts
