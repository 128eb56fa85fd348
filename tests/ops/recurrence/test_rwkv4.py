"""RWKV-4 with large keys."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.recurrences import CHANNELS, draw_diagonal, with_gradients
from zoo.ops.recurrence.rwkv4 import rwkv4


def test_rwkv4_is_finite_for_keys_of_any_size():
    _, x, _, _ = draw_diagonal(33, 6)
    w, u = jnp.zeros(CHANNELS), jnp.ones(CHANNELS)
    results, gradients = with_gradients(rwkv4, 1000 * x, x, w, u)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((results, gradients)))
    assert (results[0] <= x.max(1, keepdims=True) + 1e-5).all() and (results[0] >= x.min(1, keepdims=True) - 1e-5).all()
    moved, _ = rwkv4(x + 1000, x, w, u)
    np.testing.assert_allclose(moved, rwkv4(x, x, w, u)[0], rtol=1e-3, atol=1e-4)
