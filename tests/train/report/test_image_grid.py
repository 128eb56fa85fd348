"""Grids of images: one square per pixel with ink, captions below, frames around what was missed."""

import re

import numpy as np
import pytest

from zoo import train

IMAGES = np.zeros((3, 2, 2))
IMAGES[0, 0, 1], IMAGES[2] = 1, 0.5


def test_image_grid_draws_pixels_captions_and_frames():
    svg = train.draw_image_grid(IMAGES, ["a", "b <", "c"], [False, True, False], title="Letters", width=130)
    levels = dict(re.findall(r'fill-opacity="([\d.]+)" d="([^"]*)"', svg))
    assert {level: path.count("z") for level, path in levels.items()} == {"0.5": 4, "1": 1}
    assert levels["1"] == "M28.0,0.0h28v28h-28z"  # the first row, the second column
    assert levels["0.5"].startswith("M0.0,84.0")  # two images fill a row
    assert svg.count('class="missed"') == 1 and "b &lt;" in svg and 'aria-label="Letters"' in svg


def test_image_grid_refuses_missing_captions():
    with pytest.raises(ValueError, match="3 images, 1 captions and 3 marks"):
        train.draw_image_grid(IMAGES, ["a"], [False] * 3, title="")
