"""A checkpoint in another spelling of its family."""

from pathlib import Path

import jax
import numpy as np

import zoo


def check_respelled_files(directory: Path, fixture: Path) -> None:
    """Verify that a copy of a fixture in another spelling is the same model, and is written as it was read."""
    model = zoo.load(directory)
    for ours, wanted in zip(jax.tree.leaves(model), jax.tree.leaves(zoo.load(fixture)), strict=True):
        np.testing.assert_array_equal(ours, wanted)
    copy = directory / "again"
    source = directory if model.origin.left_aside else None
    zoo.save(jax.tree.map(np.asarray, model), copy, source=source)
    for file in ("config.json", "model.safetensors"):
        assert (copy / file).read_bytes() == (directory / file).read_bytes()
