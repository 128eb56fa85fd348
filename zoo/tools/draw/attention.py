"""Pictures of attention patterns: a square per head, with a row per query and a column per key."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from zoo._optional import import_optional

from .._figure import COLORS, INSTALL, draw_svg

_GAP, _TITLE, _LEGEND = 22, 28, 36
_SMALLEST_CELL = 9
"""Width of a cell from which on tokens are written at the edges, in pixels."""


def draw_attention(
    probabilities: Float[Array, "heads query key"] | Float[np.ndarray, "heads query key"],
    titles: Sequence[str],
    tokens: Sequence[str] = (),
    *,
    keys: Sequence[str] | None = None,
    width: int = 860,
    columns: int = 4,
) -> str:
    """Draw attention probabilities as a self-contained `<svg>`: a square per head, a row per query, a column per key.

        _, seen = zoo.capture(model, "layers.1.attention.probabilities")(tokens)
        heads = seen["layers.1.attention.probabilities"][0]
        Path("heads.svg").write_text(draw_attention(heads, [f"head {n}" for n in range(len(heads))]))

    - `titles`: one for each head.
    - `tokens`: the text of each token, written at the edges of squares that are large enough: single characters.
      `keys`: the text of each key, where it is another than that of the queries, as in cross-attention.
    - `width`: of the picture, in pixels; `columns`: squares in a row.

    The opacity of a cell is the root of its probability. **Raises** `ValueError` unless each head has a title, and each
    query and key a token if there are any; `ImportError` without matplotlib.
    """
    heads = np.asarray(probabilities, np.float32)
    count, num_queries, num_keys = heads.shape
    if keys is None:
        keys = tokens
    if len(titles) != count or (tokens and (num_queries, num_keys) != (len(tokens), len(keys))):
        raise ValueError(
            f"{count} heads of {num_queries} queries and {num_keys} keys have {len(titles)} titles and {len(tokens)} "
            f"tokens, and {len(keys)} of the keys"
        )
    rows = math.ceil(count / columns)
    has_tokens = bool(tokens) and width / columns / num_keys >= _SMALLEST_CELL + 2
    edge = 16 if has_tokens else 0
    panel = (width - 4 - _GAP * (columns - 1)) / columns - edge
    high = panel * num_queries / num_keys
    height = _LEGEND + rows * (_TITLE + edge + high)

    def draw(figure: Any) -> None:
        colors = import_optional("matplotlib.colors", INSTALL)
        opacity = colors.LinearSegmentedColormap.from_list("opacity", [f"{COLORS[0]}00", COLORS[0]])
        root = colors.PowerNorm(0.5, 0, 1)
        for number, (head, title) in enumerate(zip(heads, titles, strict=True)):
            row, column = divmod(number, columns)
            left = 2 + column * (panel + edge + _GAP) + edge
            bottom = height - _LEGEND - (row + 1) * (_TITLE + edge + high) + 2
            axes = figure.add_axes((left / width, bottom / height, panel / width, high / height))
            image = axes.imshow(head, cmap=opacity, norm=root, aspect="auto", interpolation="none")
            axes.set_title(title, loc="left", size=12, weight="bold", pad=5)
            axes.set_facecolor((0, 0, 0, 0.05))
            axes.spines[:].set(alpha=0.3, linewidth=0.5)
            axes.tick_params(length=0, labelsize=10, pad=4, top=False, labeltop=True, labelbottom=False)
            axes.set_xticks(range(num_keys) if has_tokens else (), keys if has_tokens else ())
            axes.set_yticks(range(num_queries) if has_tokens else (), tokens if has_tokens else ())
        legend = figure.add_axes((10 / width, 1 - 14 / height, 160 / width, 10 / height))
        bar = figure.colorbar(image, cax=legend, orientation="horizontal", ticks=(0, 0.1, 0.5, 1))
        legend.set_xticklabels(["0", "0.1", "0.5", "1"])
        bar.outline.set(alpha=0.3, linewidth=0.5)
        legend.tick_params(length=0, pad=3)

    return draw_svg(draw, width=width, height=height, title=f"Attention: {', '.join(titles)}")
