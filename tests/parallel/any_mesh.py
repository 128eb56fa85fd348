"""A mesh over as many of the first devices as its sizes need, and a step of a model on it."""

import math

import equinox as eqx
import jax
import numpy as np

import zoo


def make_any_mesh(layout=None, **sizes):
    return zoo.make_mesh(**{"data": 1} | sizes, devices=jax.devices()[: math.prod(sizes.values())], layout=layout)


def differentiate(model, batch, mesh=None, key=None):
    """Return the loss of a model on a mesh, by default on one device, and its gradient."""
    mesh = make_any_mesh() if mesh is None else mesh
    with jax.default_matmul_precision("highest"):
        step = eqx.filter_jit(zoo.value_and_grad(zoo.cross_entropy, mesh))
        return jax.device_get(step(zoo.place(model, mesh), zoo.place_batch(batch, mesh), key=key))


def assert_same_step(result, expected, tolerance=2e-5):
    """Compare losses, and gradients relative to the largest number of each array."""
    loss, gradient = result
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected[1]), strict=True):
        assert np.abs(x - y).max() <= tolerance * max(1e-2, np.abs(y).max())
