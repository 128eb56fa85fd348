"""Parts of recurrent mixers: low-rank projections, and decays."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.layers import Linear
from zoo.layers.recurrent.common import DecayGate, LowRank, divide_by_sum, elu_plus_one
from zoo.parallel import Dim

KEY = jax.random.key(0)


def test_low_rank_transpose_requires_no_activation():
    low_rank = LowRank(4, 3, rank=2, key=KEY)
    dense = low_rank.up.weight @ low_rank.down.weight
    tolerance = 2e-5 * float(jnp.abs(dense).max())
    assert jnp.abs(low_rank(jnp.eye(4)).T - dense).max() <= tolerance
    assert jnp.abs(low_rank.transposed(jnp.eye(3)) - dense).max() <= tolerance
    with pytest.raises(NotImplementedError, match="has no transpose"):
        LowRank(4, 3, rank=2, activation=jnp.tanh, key=KEY).transposed(jnp.ones(3))


@pytest.mark.parametrize("per_head", [1, 3])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_log_decays_equal_their_formula(per_head, lower_bound):
    """Without a bound -exp(A_log) softplus(z), and with one bound sigmoid(exp(A_log) z)."""
    step = partial(Linear, 4, in_=Dim("embed"))
    gate = DecayGate(step, 2, per_head, lower_bound=lower_bound, key=KEY)
    x = 9 * jax.random.normal(KEY, (2, 5, 4))
    z = (x @ gate.step.weight.T + gate.bias).reshape(2, 5, 2, per_head)
    rate = jnp.exp(gate.A_log)[:, None]
    wanted = -rate * jax.nn.softplus(z) if lower_bound is None else lower_bound * jax.nn.sigmoid(rate * z)
    decays = gate(x)
    assert jnp.allclose(decays, wanted.reshape(decays.shape), rtol=1e-4, atol=1e-6) and decays.max() <= 0
    assert lower_bound is None or decays.min() >= lower_bound


def test_keys_above_zero_sum_to_one():
    x = jnp.asarray([[-1.0, 0.0, 2.0]])
    raised = np.asarray([[np.exp(-1), 1, 3]])
    np.testing.assert_allclose(elu_plus_one(x), raised, rtol=1e-6)
    features = divide_by_sum(elu_plus_one(x)[None, None])[0, 0]
    np.testing.assert_allclose(features, raised / raised.sum(), rtol=1e-6)
