"""The RG-LRU at its limits: no decay, and the first token."""

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


def rg_lru_on_shard(tokens, fixed, ids, state, fresh):
    x, r, i = tokens
    is_first = None if fresh is None else (jnp.arange(x.shape[1]) == 0) & fresh[:, None]
    return rg_lru(x, r, i, fixed, is_first=is_first, state=state, segment_ids=ids)


@settings(max_examples=6)
@given(seed=st.integers(0, 99), packed=st.booleans(), strength=st.sampled_from([0.1, 2, 20]))
def test_rg_lru_of_shards_equals_one_device(seed, packed, strength):
    r, x, _, _ = draw_diagonal(40, seed, strength=strength)
    param, ids = strength * jnp.linspace(-3, 2, CHANNELS), draw_documents(40, seed, packed=packed)
    assert_shards_equal_one_device(rg_lru_on_shard, (x, r, x[::-1]), param, ids)


def test_rg_lru_of_a_shard_must_know_its_first_tokens():
    _, x, _, _ = draw_diagonal(7, 5)
    with pytest.raises(ValueError, match="rg_lru: the state of earlier shards does not tell .*: pass is_first"):
        rg_lru(x, x, x, jnp.zeros(CHANNELS), state=lambda affine_map: affine_map.offset)
