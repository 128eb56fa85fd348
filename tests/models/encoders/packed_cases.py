"""Cases of language models that read images, with their images in rows."""

import dataclasses
import json
import os
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from einops import rearrange
from safetensors.numpy import load_file

import zoo
from zoo.layers.encoders.packed_images import PackedImages

FIXTURES = Path(__file__).parents[2] / "fixtures" / "image_text"
PARITY = Path(os.environ.get("ZOO_PARITY", "")) / "models_vision"


def find_case(name):
    for folder in (FIXTURES / name, PARITY / name):
        if (folder / "expected.safetensors").exists():
            return folder
    return pytest.skip(f"{name} is neither a fixture nor in ZOO_PARITY")


@cache
def load_case(name):
    """Return the model of a case, its images in rows, and what is expected of it."""
    folder = find_case(name)
    expected = load_file(folder / "expected.safetensors")
    rows_of = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["rows_of"]
    return zoo.load(folder), read_images(expected, rows_of), expected


def read_images(expected, rows_of):
    if "image_sizes" in expected:  # Pixtral's images, cut into patches of 4 x 4 pixels
        grids = np.insert(expected["image_sizes"] // 4, 0, 1, axis=1)
        patches = rearrange(expected["pixel_values"], "n c (y h) (x w) -> n y x (c h w)", h=4, w=4)
        cut = [
            x[:rows, :columns].reshape(rows * columns, -1) for x, (_, rows, columns) in zip(patches, grids, strict=True)
        ]
        return pack(np.concatenate(cut), grids, rows_of["image_sizes"])
    if "image_position_ids" in expected:  # Gemma 4's, padded
        places = expected["image_position_ids"]
        grids = np.insert(places.max(1)[:, ::-1] + 1, 0, 1, axis=1)
        real = places[..., 0] >= 0
        for name in [name for name in expected if name.startswith("vision_hidden_states")]:
            expected[name] = expected[name][real]
        return pack(expected["pixel_values"][real], grids, rows_of["pixel_values"])
    end = "_videos" if "pixel_values_videos" in expected else ""
    counts = rows_of["video_grid_thw" if end else "image_grid_thw"]
    images = pack(expected[f"pixel_values{end}"], expected["video_grid_thw" if end else "image_grid_thw"], counts)
    if not end:
        return images
    seconds = pack(expected["second_per_grid_ts"][:, None], np.ones((sum(counts), 3), int), counts).pixels[..., 0]
    return dataclasses.replace(images, seconds=seconds)


def pack(pixels, grids, counts):
    """Return the rows of images, of which each row has `counts`."""
    patches = np.split(pixels, np.cumsum(grids.prod(-1))[:-1])
    rows = [patches[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]
    longest = max(sum(map(len, row)) for row in rows)
    packed = np.zeros((len(rows), longest, pixels.shape[-1]), np.float32)
    packed_grids = np.zeros((len(rows), max(counts), 3), np.int32)
    for i, row in enumerate(rows):
        if row:
            joined = np.concatenate(row)
            packed[i, : len(joined)] = joined
            packed_grids[i, : len(row)] = grids[sum(counts[:i]) : sum(counts[: i + 1])]
    return PackedImages(jnp.asarray(packed), jnp.asarray(packed_grids))


def select_rows(images, row):
    return PackedImages(images.pixels[row : row + 1], images.grids[row : row + 1])


def pad(images, patches, more=1, *, value=7.0):
    """Append patches to each row, and empty grids."""
    pixels = jnp.pad(images.pixels, ((0, 0), (0, patches), (0, 0)), constant_values=value)
    return PackedImages(pixels, jnp.pad(images.grids, ((0, 0), (0, more), (0, 0))))


def join_rows(x, counts):
    """Return the first items of each row, one row after the other."""
    return np.concatenate([np.asarray(x)[i, :count] for i, count in enumerate(counts)])
