"""RWKV-4 with large keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recurrences import (
    CHANNELS,
    assert_shards_equal_one_device,
    draw_diagonal,
    draw_documents,
    with_gradients,
)
from zoo.ops.recurrence.rwkv4 import rwkv4


@pytest.mark.ci
def test_rwkv4_is_finite_for_keys_of_any_size():
    _, x, _, _ = draw_diagonal(33, 6)
    w, u = jnp.zeros(CHANNELS), jnp.ones(CHANNELS)
    results, gradients = with_gradients(rwkv4, 1000 * x, x, w, u)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((results, gradients)))
    assert (results[0] <= x.max(1, keepdims=True) + 1e-5).all() and (results[0] >= x.min(1, keepdims=True) - 1e-5).all()
    moved, _ = rwkv4(x + 1000, x, w, u)
    np.testing.assert_allclose(moved, rwkv4(x, x, w, u)[0], rtol=1e-3, atol=1e-4)


def rwkv4_on_shard(tokens, fixed, ids, state, fresh):
    """Return the state as numbers that do not depend on the rounding of its maximum."""
    output, last = rwkv4(*tokens, *fixed, state=state, segment_ids=ids)
    return output, (last.numerator / last.denominator, last.maximum)


@pytest.mark.ci
@settings(max_examples=6)
@given(seed=st.integers(0, 99), packed=st.booleans(), strength=st.sampled_from([0.1, 9, 300]))
def test_rwkv4_of_shards_equals_one_device(seed, packed, strength):
    """Keys far below and above zero, and decays from exp(-0.01) to exp(-1e4) per token."""
    offset, x, state, _ = draw_diagonal(40, seed, strength=strength)
    ids = draw_documents(40, seed, packed=packed)
    decay = jnp.asarray([-5.0, 0.0, 9.0])
    assert_shards_equal_one_device(rwkv4_on_shard, (strength * x + 3 * offset, x), (decay, state[0]), ids)
