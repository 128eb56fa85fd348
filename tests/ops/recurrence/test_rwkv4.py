"""RWKV-4 with large keys, in packed rows and after padding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recurrences import (
    BATCH,
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


def test_rwkv4_of_documents_and_after_padding():
    """A document is read as if alone. Padding changes no state."""
    is_second = jnp.asarray([[False] * 4 + [True] * 5] * BATCH)
    run = partial(rwkv4, w=jnp.zeros(CHANNELS), u=jnp.ones(CHANNELS))

    @jax.jit
    def list_pairs(k, v):
        packed, last = run(k, v, segment_ids=1 + is_second.astype(int))
        first, between = run(k[:, :4], v[:, :4])
        second, end = run(k[:, 4:], v[:, 4:])
        padded, last_padded = run(k, v, state=between, token_mask=is_second)
        following, end_following = run(k[:, 4:], v[:, 4:], state=between)
        average = lambda state: state.numerator / state.denominator
        states = (average(last), average(end)), (average(last_padded), average(end_following))
        return (packed, jnp.concatenate([first, second], axis=1)), (padded[:, 4:], following), *states

    for found, expected in list_pairs(*draw_diagonal(9, 5)[:2]):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


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
