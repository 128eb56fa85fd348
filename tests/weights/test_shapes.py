"""Models of checkpoints in shapes have the dtypes of their files."""

from pathlib import Path

import jax
import pytest

import zoo
from zoo.weights.shapes import read_shapes

MODELS = Path(__file__).parents[1] / "fixtures" / "models"


@pytest.mark.parametrize("name", ["llama", "diffllama"])  # the files of one hold all arrays, of the other not
def test_shapes_and_dtypes_are_those_of_the_loaded_model(name):
    model = zoo.load(MODELS / name)
    described = [(x.shape, x.dtype) for x in jax.tree.leaves(read_shapes(MODELS / name))]
    assert described == [(x.shape, x.dtype) for x in jax.tree.leaves(model)]
