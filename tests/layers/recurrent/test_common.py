"""Low-rank projections, parts of recurrent mixers."""

import jax
import jax.numpy as jnp
import pytest

from zoo.layers.recurrent.common import LowRank

KEY = jax.random.key(0)


def test_low_rank_transpose_requires_no_activation():
    low_rank = LowRank(4, 3, rank=2, key=KEY)
    dense = low_rank.up.weight @ low_rank.down.weight
    tolerance = 2e-5 * float(jnp.abs(dense).max())
    assert jnp.abs(low_rank(jnp.eye(4)).T - dense).max() <= tolerance
    assert jnp.abs(low_rank.transposed(jnp.eye(3)) - dense).max() <= tolerance
    with pytest.raises(NotImplementedError, match="has no transpose"):
        LowRank(4, 3, rank=2, activation=jnp.tanh, key=KEY).transposed(jnp.ones(3))
