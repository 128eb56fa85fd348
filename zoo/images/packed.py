"""Pictures as patches, in their own aspect ratio: Qwen-VL, Pixtral and Gemma 4."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from einops import rearrange

from .pictures import RGB, check_resized, normalize_pixels, read_edge, resize_picture
from .processed import Measured, Packed

_LONGEST = 200
"""The largest ratio of the edges of a picture that Qwen-VL reads."""
_SOFT_TOKENS = (70, 140, 280, 560, 1120)
_Settings = Mapping[str, Any]
_Size = tuple[int, int]
"""Height and width in pixels, or rows and columns."""


class Patching(NamedTuple):
    """Patches of a family: resize a picture to whole tokens, and cut it."""

    fit: Callable[[_Size, _Size, _Settings], _Size]
    """From the size of a picture, and of a token, to the size in whole tokens that it is resized to."""
    read_patch: Callable[[_Settings], tuple[_Size, int]]
    """Returns the size of a patch, and the rows, or columns, of patches in a token."""
    order: str
    """Order of the numbers of patches: y and x, rows and columns of tokens; a and b, of patches in a token; h and w, of
    pixels in a patch; c, colors; t, equal frames."""

    def measure(self, size: _Size, settings: _Settings) -> Measured:
        """Return the shapes that `process` makes of a picture. **Raises** `ValueError` if tokens do not cover it."""
        patch, merge = self.read_patch(settings)
        unit = (patch[0] * merge, patch[1] * merge)
        if settings["do_resize"]:
            fitted = self.fit(size, unit, settings)
            check_resized(size, fitted)
            size = fitted
        if size[0] % unit[0] or size[1] % unit[1]:
            token = f"a token {unit[0]} x {unit[1]}"
            raise ValueError(f"a picture has {size[0]} x {size[1]} pixels, and {token}: do_resize makes multiples")
        grid = (size[0] // patch[0], size[1] // patch[1])
        pixels = 3 * settings.get("temporal_patch_size", 1) * math.prod(patch)
        return Measured((math.prod(grid), pixels), (grid[0] // merge, grid[1] // merge), grid)

    def process(self, image: RGB, settings: _Settings) -> Packed:
        """Return the flattened patches of a picture, and rows and columns of its patches and of its tokens."""
        _, shape, grid = self.measure(image.shape[:2], settings)
        patch, merge = self.read_patch(settings)
        if settings["do_resize"]:
            image = resize_picture(image, (grid[0] * patch[0], grid[1] * patch[1]), settings)
        frames = np.stack([normalize_pixels(image, settings)] * settings.get("temporal_patch_size", 1))
        sizes = {"a": merge, "b": merge, "h": patch[0], "w": patch[1]}
        return rearrange(frames, f"t c (y a h) (x b w) -> {self.order}", **sizes), grid, shape


def _fit_qwen(size: _Size, unit: _Size, settings: _Settings) -> _Size:
    return fit_pixels(size, unit[0], *_read_limits(settings))


def _read_limits(settings: _Settings) -> _Size:
    """Return the least and the most pixels of a picture, which older files call min_pixels and max_pixels. **Raises**
    `ValueError` for a size that says something else."""
    limits = {"shortest_edge": settings.get("min_pixels"), "longest_edge": settings.get("max_pixels")}
    limits = {**settings["size"], **{key: value for key, value in limits.items() if value is not None}}
    if not limits.get("shortest_edge") or not limits.get("longest_edge"):
        raise ValueError(
            f"size = {settings['size']}: expected shortest_edge and longest_edge, the least and most pixels"
        )
    return limits["shortest_edge"], limits["longest_edge"]


def fit_pixels(size: tuple[int, int], unit: int, least: int, most: int) -> tuple[int, int]:
    """Return the height and width in multiples of `unit` that are nearest to a picture's, scaled such that there are
    `least` to `most` pixels. Where one unit per side is more than `most` allows, it is kept.

    **Raises** `ValueError` for a picture more than 200 times as long as wide.
    """
    if max(size) > _LONGEST * min(size):
        raise ValueError(
            f"a picture of {size[0]} x {size[1]} pixels is longer than {_LONGEST} times its width: crop or resize it"
        )
    height, width = (round(side / unit) * unit for side in size)
    if height * width > most:
        scale = math.sqrt(math.prod(size) / most)
        height, width = (max(unit, math.floor(side / scale / unit) * unit) for side in size)
    elif height * width < least:
        scale = math.sqrt(least / math.prod(size))
        height, width = (math.ceil(side * scale / unit) * unit for side in size)
    return height, width


def _fit_pixtral(size: _Size, unit: _Size, settings: _Settings) -> _Size:
    """Return the size of a picture shrunk to the longest edge of `size`, and rounded up to whole tokens."""
    most = settings["size"]
    largest = (most["height"], most["width"]) if "height" in most else (read_edge(settings, "size"),) * 2
    ratio = max(1, size[0] / largest[0], size[1] / largest[1])
    height, width = (math.floor(side / ratio) for side in size)
    return math.ceil(height / unit[0]) * unit[0], math.ceil(width / unit[1]) * unit[1]


def _read_patch_pixtral(settings: _Settings) -> tuple[_Size, int]:
    """Return the patch, and `spatial_merge_size`: 1, and in Mistral 3 more, by its processor_config.json."""
    patch = settings["patch_size"]
    patch = (patch["height"], patch["width"]) if isinstance(patch, Mapping) else (patch, patch)
    return patch, settings.get("spatial_merge_size", 1)


def _fit_gemma4(size: _Size, unit: _Size, settings: _Settings) -> _Size:
    return fit_tokens(size, unit[0], settings["max_soft_tokens"])


def _read_patch_gemma4(settings: _Settings) -> tuple[_Size, int]:
    """**Raises** `ValueError` for a number of tokens that models were not trained with."""
    if (most := settings["max_soft_tokens"]) not in _SOFT_TOKENS:
        raise ValueError(f"max_soft_tokens = {most}: expected one of {', '.join(map(str, _SOFT_TOKENS))}")
    return (settings["patch_size"],) * 2, settings["pooling_kernel_size"]


def fit_tokens(size: tuple[int, int], unit: int, most: int) -> tuple[int, int]:
    """Return the largest height and width in multiples of `unit` that make at most `most` units, in about the aspect
    ratio of a picture: rounded down, and one row or column for a picture that is longer than `most` times its width."""
    scale = math.sqrt(most * unit**2 / math.prod(size))
    height, width = (math.floor(scale * side / unit) for side in size)
    if height == 0:
        return unit, most * unit
    if width == 0:
        return most * unit, unit
    return height * unit, width * unit


def _read_patch_qwen(settings: _Settings) -> tuple[_Size, int]:
    return (settings["patch_size"],) * 2, settings["merge_size"]


QWEN = Patching(_fit_qwen, _read_patch_qwen, "(y x a b) (c t h w)")
"""The patches of one token are neighbors, and a picture is a film of equal frames (Qwen2-VL, arXiv:2409.12191, section
2.1)."""
PIXTRAL = Patching(_fit_pixtral, _read_patch_pixtral, "(y a x b) (t c h w)")
"""Row by row (Pixtral, arXiv:2410.07073)."""
GEMMA4 = Patching(_fit_gemma4, _read_patch_gemma4, "(y a x b) (t h w c)")
"""Row by row, as many tokens as `max_soft_tokens` allows."""
