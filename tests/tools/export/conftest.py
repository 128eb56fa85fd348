"""Fixture: a small model."""

import jax
import pytest

import zoo


@pytest.fixture(scope="session")
def model():
    """Two layers, which trace in a second."""
    return zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=16, key=jax.random.key(0))
