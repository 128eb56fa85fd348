"""Pictures as images of one size: the whole picture, and tiles of it in rows and columns.

The functions return the images of a picture, and rows and columns of its tiles: 0 and 0 for the whole picture only.
Those that measure return the shapes of the same, from the size of a picture.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from einops import rearrange
from jaxtyping import Float

from .pictures import (
    RGB,
    check_resized,
    normalize_pixels,
    process_whole,
    read_crop,
    read_edge,
    read_size,
    resize_picture,
)
from .processed import Measured, Tiled

_LARGEST = 4096
"""Pixels of the longer edge that Idefics 3 cuts at most."""


def process_llava(image: RGB, settings: Mapping[str, Any]) -> Tiled:
    """Process a picture as a whole: LLaVA, which may pad it to a square with the mean color first, and PaliGemma."""
    if settings.get("do_pad"):
        height, width, _ = image.shape
        side = max(height, width)
        square = np.zeros((side, side, 3), np.uint8)
        square[:] = [int(255 * mean) for mean in settings["image_mean"]]
        top = (side - height) // 2
        left = (side - width) // 2
        square[top : top + height, left : left + width] = image
        image = square
    return process_whole(image, settings)[None], (0, 0)


def measure_llava(size: tuple[int, int], settings: Mapping[str, Any]) -> Measured:
    """Return the shapes that `process_llava` makes."""
    if settings.get("do_pad"):
        size = (max(size), max(size))
    if settings["do_resize"]:
        size = read_size(size, settings["size"])
    if settings["do_center_crop"]:
        size = read_crop(settings["crop_size"])
    return _measure_tiles(size, (0, 0))


def process_gemma3(image: RGB, settings: Mapping[str, Any]) -> Tiled:
    """Process a picture as a whole, then, with pan and scan, the crops of a long one (Gemma 3, arXiv:2503.19786,
    section 2.1)."""
    rows, columns = _count_crops(image.shape[:2], settings)
    images = [image]
    if rows * columns > 0:
        height = math.ceil(image.shape[0] / rows)
        width = math.ceil(image.shape[1] / columns)
        corners = [(height * row, width * column) for row in range(rows) for column in range(columns)]
        images += [image[y : y + height, x : x + width] for y, x in corners]
    if settings["do_resize"]:
        images = [resize_picture(x, read_size(x.shape, settings["size"]), settings) for x in images]
    return np.stack([normalize_pixels(x, settings) for x in images]), (rows, columns)


def measure_gemma3(size: tuple[int, int], settings: Mapping[str, Any]) -> Measured:
    """Return the shapes that `process_gemma3` makes."""
    crops = _count_crops(size, settings)
    if settings["do_resize"]:
        size = read_size(size, settings["size"])
    return Measured((1 + math.prod(crops), 3, *size), crops)


def _count_crops(size: tuple[int, int], settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and columns of crops along the longer edge; 0 and 0 where the picture is nearly square, or crops
    would be smaller than `pan_and_scan_min_crop_size`."""
    short, long = sorted(size)
    least = settings["pan_and_scan_min_crop_size"]
    if not settings["do_pan_and_scan"] or long / short < settings["pan_and_scan_min_ratio_to_activate"]:
        return 0, 0
    count = max(2, min(long // least, math.floor(long / short + 0.5)))
    count = min(count, settings["pan_and_scan_max_num_crops"])
    if min(math.ceil(long / count), short) < least:
        return 0, 0
    return (1, count) if size[1] >= size[0] else (count, 1)


def process_idefics3(image: RGB, settings: Mapping[str, Any]) -> Tiled:
    """Scale a picture to the longest edge of `size`, then to whole tiles of `max_image_size`, and cut it; the picture
    as a whole comes last. A picture of one tile is not cut (Idefics 3, arXiv:2408.12637)."""
    tile = read_edge(settings, "max_image_size")
    if settings["do_resize"]:
        image = resize_picture(image, _scale_to_edge(image.shape[:2], read_edge(settings, "size")), settings)
    grid = (0, 0)
    if settings["do_image_splitting"]:
        grid = _count_tiles(image.shape[:2], tile)
        image = resize_picture(image, (grid[0] * tile, grid[1] * tile), settings)
    whole = resize_picture(image, (tile, tile), settings)
    if math.prod(grid) <= 1:
        return normalize_pixels(whole, settings)[None], (0, 0)
    return _cut_tiles(image, whole, grid, settings), grid


def measure_idefics3(size: tuple[int, int], settings: Mapping[str, Any]) -> Measured:
    """Return the shapes that `process_idefics3` makes."""
    tile = read_edge(settings, "max_image_size")
    tiles = (0, 0)
    if settings["do_resize"]:
        size = _scale_to_edge(size, read_edge(settings, "size"))
    if settings["do_image_splitting"]:
        tiles = _count_tiles(size, tile)
        check_resized(size, tiles)
    return _measure_tiles((tile, tile), tiles)


def _scale_to_edge(size: tuple[int, int], edge: int) -> tuple[int, int]:
    """Return the height and width of a picture scaled to a longer edge of `edge`, with an even shorter edge. **Raises**
    `ValueError` for an edge beyond the largest."""
    if edge > _LARGEST:
        raise ValueError(f"size = {{'longest_edge': {edge}}}: expected at most {_LARGEST}")
    short = _scale_short(size, edge)
    short = max(short + short % 2, 1)
    return (short, edge) if size[1] >= size[0] else (edge, short)


def _scale_short(size: tuple[int, int], edge: int) -> int:
    """Return the shorter edge of a picture scaled to a longer edge of `edge`, rounded down."""
    ratio = size[1] / size[0]
    if ratio >= 1:
        return int(edge / ratio)
    return int(edge * ratio)


def _count_tiles(size: tuple[int, int], tile: int) -> tuple[int, int]:
    """Return rows and columns of the tiles that cover a picture with its longer edge stretched to whole tiles."""
    longest = math.ceil(max(size) / tile)
    shortest = math.ceil(_scale_short(size, longest * tile) / tile)
    return (shortest, longest) if size[1] >= size[0] else (longest, shortest)


def process_internvl(image: RGB, settings: Mapping[str, Any]) -> Tiled:
    """Cut a picture into a grid of tiles with the nearest aspect ratio; the picture as a whole comes last. A picture of
    one tile is not cut (InternVL 1.5, arXiv:2404.16821, section 3.3)."""
    tile = read_size(image.shape, settings["size"])
    grid = (1, 1)
    if settings["crop_to_patches"]:
        grid = _fit_tiles(image.shape[:2], tile, settings["min_patches"], settings["max_patches"])
    if math.prod(grid) == 1:
        if settings["do_resize"] or settings["crop_to_patches"]:
            image = resize_picture(image, tile, settings)
        return normalize_pixels(image, settings)[None], (0, 0)
    stretched = resize_picture(image, (grid[0] * tile[0], grid[1] * tile[1]), settings)
    return _cut_tiles(stretched, resize_picture(image, tile, settings), grid, settings), grid


def measure_internvl(size: tuple[int, int], settings: Mapping[str, Any]) -> Measured:
    """Return the shapes that `process_internvl` makes."""
    tile = read_size(size, settings["size"])
    tiles = (1, 1)
    if settings["crop_to_patches"]:
        tiles = _fit_tiles(size, tile, settings["min_patches"], settings["max_patches"])
    elif not settings["do_resize"]:
        tile = size
    return _measure_tiles(tile, tiles)


def _measure_tiles(size: tuple[int, int], tiles: tuple[int, int]) -> Measured:
    """Return the shapes of a picture and its tiles. A picture of one tile is not cut."""
    count = math.prod(tiles)
    if count == 1:
        return Measured((1, 3, *size), (0, 0))
    return Measured((1 + count, 3, *size), tiles)


def _fit_tiles(size: tuple[int, int], tile: tuple[int, int], least: int, most: int) -> tuple[int, int]:
    """Return rows and columns of `least` to `most` tiles with the aspect ratio nearest to a picture's. Of equally near
    grids, a larger one is taken if the picture has more than half of its pixels."""
    counts = range(1, most + 1)
    grids = [(y, x) for x in counts for y in counts if least <= y * x <= most]
    best = (1, 1)
    nearest = math.inf
    for rows, columns in sorted(grids, key=math.prod):
        distance = abs(size[1] / size[0] - columns / rows)
        is_covered = 2 * math.prod(size) > math.prod(tile) * rows * columns
        if distance < nearest or (distance == nearest and is_covered):
            nearest = distance
            best = (rows, columns)
    return best


def _cut_tiles(
    image: RGB, whole: RGB, grid: tuple[int, int], settings: Mapping[str, Any]
) -> Float[np.ndarray, "_ 3 _ _"]:
    """Return the tiles of a picture, row by row, and the whole picture last."""
    tiles = rearrange(image, "(y h) (x w) c -> (y x) h w c", y=grid[0], x=grid[1])
    return np.stack([normalize_pixels(x, settings) for x in (*tiles, whole)])
