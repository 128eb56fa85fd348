"""The RG-LRU at its limits: no decay, and the first token."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.recurrences import BATCH, CHANNELS, draw_diagonal, with_gradients
from zoo.ops.recurrence.rg_lru import rg_lru


def test_rg_lru_gradients_are_finite_without_decay():
    _, x, _, _ = draw_diagonal(7, 4)
    for param in (-200.0, -20.0, 200.0):  # a is one to the last digit, one but for a few, and zero
        results, gradients = with_gradients(rg_lru, x, x, x, jnp.full(CHANNELS, param))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((results, gradients)))


def test_rg_lru_does_not_scale_the_first_token():
    _, x, state, _ = draw_diagonal(7, 5)
    param = jnp.zeros(CHANNELS)
    ids = jnp.asarray([[0, 0, 0, 1, 1, 1, 1]] * BATCH)
    output, _ = rg_lru(x, x, x, param, segment_ids=ids)
    np.testing.assert_allclose(output[:, [0, 3]], (jax.nn.sigmoid(x) * x)[:, [0, 3]], rtol=1e-5)
    going_on, _ = rg_lru(x, x, x, param, state=jnp.zeros_like(state))
    assert (np.abs(going_on[:, 0]) < np.abs(output[:, 0])).all()
