"""Fixtures: models of any family without compilation (shapes from `build`, numbers from numpy), damaged checkpoints."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.spec import Origin

from .damage import LLAMA, bits_of, catch_error, labeled, time_limit


def make_model(family, config, *, seed=0, dtype=jnp.float32):
    """Build a config's model as if loaded from a checkpoint, with random numpy arrays.

    Slices of numpy arrays, unlike those of JAX, are not compiled for each shape.
    """
    family = FAMILIES[family]
    config = {"model_type": family.name, **config}
    abstract = eqx.filter_eval_shape(lambda key: family.build(read_config(family, config), key=key), jax.random.key(0))
    random = np.random.default_rng(seed)

    def fill(x):
        if not hasattr(x, "dtype"):
            return x
        if jnp.issubdtype(x.dtype, jnp.integer):  # a table of experts
            return random.integers(2, size=x.shape).astype(x.dtype)
        return random.normal(size=x.shape).astype(dtype)

    return dataclasses.replace(jax.tree.map(fill, abstract), origin=Origin(family, json.dumps(config)))


@pytest.fixture(scope="session")
def make():
    return make_model


@pytest.fixture(scope="module")
def checkpoint(make, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    zoo.save(make("llama", LLAMA), path)
    return path


@pytest.fixture(scope="module")
def sharded(make, tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    zoo.save(make("llama", LLAMA), path, shard_bytes=1500)
    return path


@pytest.fixture(scope="module")
def bits(checkpoint):
    return bits_of(zoo.load(checkpoint))


@pytest.fixture
def allocations(monkeypatch):
    """The shapes of the arrays allocated so far."""
    allocated, fill = [], jax.make_array_from_callback
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *a, **k: allocated.append(a[0]) or fill(*a, **k))
    return allocated


@pytest.fixture
def attempt(allocations, bits):
    """`attempt(label, directory)` loads a damaged checkpoint and returns the error's message.

    It checks the error's class, its length, and that it was raised before anything was allocated.
    """

    def run(label, directory, *, allocates=False, **options):
        allocations.clear()
        with labeled(label), time_limit():
            message = catch_error(lambda: zoo.load(directory, **options))
            assert message is not None, "it was loaded"
            assert allocates or not allocations, "arrays were allocated before the error"
        return message

    def harmless(label, directory):
        with labeled(label), time_limit():
            assert bits_of(zoo.load(directory)) == bits

    run.harmless = harmless
    return run
