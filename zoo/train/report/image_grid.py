"""Grids of small images with captions, as inline SVG."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from .chart import svg_text, wrap_svg

_CELL, _GAP, _CAPTION = 56.0, 10.0, 18.0
_LEVELS = 16


def draw_image_grid(
    images: Float[np.ndarray, "count height width"],
    captions: Sequence[str],
    missed: Sequence[bool] | Bool[np.ndarray, "count"],
    *,
    title: str,
    width: int = 860,
    height: int | None = None,
) -> str:
    """Draw grayscale images row by row, each above its caption, as an `<svg>` element `width` wide.

    Intensities are from 0, which is the color of the page, to 1, that of its ink. A frame marks the images that were
    `missed`. `height` is ignored: as many rows as the images need are drawn.

    **Raises** `ValueError` for no images, and unless each has one caption and one mark.
    """
    if not len(images) == len(captions) == len(missed) > 0:
        counts = f"{len(images)} images, {len(captions)} captions and {len(missed)} marks"
        raise ValueError(f"{counts}: each image has one caption and one mark")
    columns = max(int((width + _GAP) // (_CELL + _GAP)), 1)
    levels, parts = np.rint(np.clip(images, 0, 1) * _LEVELS).astype(int), []
    places = [divmod(number, columns) for number in range(len(images))]
    corners = [(column * (_CELL + _GAP), row * (_CELL + _CAPTION + _GAP)) for row, column in places]
    size = _CELL / max(images.shape[1:])
    for level in range(1, _LEVELS + 1):  # one path per level, of all pixels of all images
        pixels = [(*corners[number], row, column) for number, row, column in np.argwhere(levels == level)]
        starts = [f"M{x + column * size:.1f},{y + row * size:.1f}" for x, y, row, column in pixels]
        squares = [f"{start}h{size:g}v{size:g}h-{size:g}z" for start in starts]
        if squares:
            parts.append(f'<path class="pixels" fill-opacity="{level / _LEVELS:g}" d="{"".join(squares)}"/>')
    for (x, y), caption, is_missed in zip(corners, captions, missed, strict=True):
        parts.append(svg_text(x + _CELL / 2, y + _CELL + _CAPTION - 4, caption, "middle"))
        if is_missed:
            parts.append(f'<path class="missed" d="M{x:.1f},{y:.1f}h{_CELL:g}v{_CELL:g}h-{_CELL:g}z"/>')
    return wrap_svg(parts, title, width, corners[-1][1] + _CELL + _CAPTION)
