"""Descriptions of small models on meshes, traced once for all tests."""

import functools
from typing import Any

import equinox as eqx
import jax
import pytest

import zoo
from zoo.parallel.devices import make_abstract_mesh
from zoo.tools.draw import describe_layout

SIZES: dict[str, Any] = {"vocab": 64, "embed": 32, "layers": 4, "heads": 4, "kv_heads": 2, "mlp": 64}


def make_shapes(*, experts=False):
    """Return a Transformer, or a mixture of experts, in shapes."""
    make: Any = zoo.models.MixtureOfExperts if experts else zoo.models.Transformer
    options: dict[str, Any] = {"experts": 4, "top": 2} if experts else {}
    return eqx.filter_eval_shape(lambda: make(**SIZES, **options, key=jax.random.key(0)))


@functools.cache
def _describe(layout, axes):
    mesh = make_abstract_mesh(layout, **dict(axes))
    assert mesh is not None
    return describe_layout(make_shapes(experts="expert" in dict(axes)), mesh, seq_len=32)


@pytest.fixture(scope="session")
def describe():
    """Describe a small model on a mesh of these sizes."""
    return lambda layout=None, **axes: _describe(layout, tuple(axes.items()))
