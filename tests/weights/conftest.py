"""Models of any family without a compilation: shapes from `build`, numbers from numpy."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.spec import Origin


def model_of(family, config, *, seed=0, dtype=jnp.float32):
    """What a config describes, as if it had been read from a checkpoint that says so. Its random numbers are numpy's,
    whose slices, unlike those of JAX, are not compiled for each shape."""
    family = FAMILIES[family]
    given = {"model_type": family.name, **config}
    read = read_config(family, given)
    abstract = eqx.filter_eval_shape(lambda key: family.build(read, key=key), jax.random.key(0))
    draw = np.random.default_rng(seed)
    fill = lambda x: draw.normal(size=x.shape).astype(dtype) if hasattr(x, "dtype") else x
    return dataclasses.replace(jax.tree.map(fill, abstract), origin=Origin(family, json.dumps(given)))


@pytest.fixture(scope="session")
def make():
    return model_of
