"""The dropout mask depends on the key and the global index alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from zoo.ops.dropout import dropout

BATCH, SEQ, FEATURES = 3, 13, 22
KEYS = jax.random.split(jax.random.key(0), BATCH)
GLOBAL_MASK = dropout(jnp.ones((BATCH, SEQ, FEATURES)), KEYS, rate=0.3)


@jax.jit
def traced(x, seq_offset, feature_offset):
    return dropout(x, KEYS, rate=0.3, seq_offset=seq_offset, feature_offset=feature_offset)


@pytest.mark.ci
@given(st.sampled_from([(5, 9), (4, 6), (1, 1), (3, 22)]), st.data())
def test_dropout_of_a_shard_is_a_slice_of_the_global_mask(shape, data):
    seq, features = shape
    s = data.draw(st.integers(0, SEQ - seq))
    f = data.draw(st.integers(0, FEATURES - features))
    part = GLOBAL_MASK[:, s : s + seq, f : f + features]
    x = jnp.ones((BATCH, *shape))
    np.testing.assert_array_equal(traced(x, s, f), part)
    np.testing.assert_array_equal(dropout(x, KEYS, rate=0.3, seq_offset=s, feature_offset=f), part)


def test_dropout_on_a_mesh_is_bitwise_equal():
    mesh = jax.make_mesh((2, 2, 2), ("data", "context", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    keys = jax.random.split(jax.random.key(1), 4)
    x = jax.random.normal(jax.random.key(2), (4, 6, 14))

    def run_shard(x, keys):
        offset = lambda axis, dim: lax.axis_index(axis) * x.shape[dim]
        return dropout(x, keys, rate=0.5, seq_offset=offset("context", 1), feature_offset=offset("tensor", 2))

    specs = P("data", "context", "tensor")
    on_mesh = jax.jit(jax.shard_map(run_shard, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs))
    np.testing.assert_array_equal(on_mesh(x, keys), dropout(x, keys, rate=0.5))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keep_rate_and_scale(rate):
    x = jnp.full((4, 100, 250), 3.0)
    y = np.asarray(dropout(x, jax.random.split(jax.random.key(3), 4), rate=rate))
    kept = y != 0
    # The keep rate of 100,000 values has a standard deviation of at most 0.0016; four of them. The mask is fixed.
    assert abs(kept.mean() - (1 - rate)) < 0.0064
    np.testing.assert_allclose(y[kept], 3 / (1 - rate), rtol=1e-6)
    for axes in ((0, 1), (0, 2), (1, 2)):  # all rows, positions and features have the same rate
        deviation = (rate * (1 - rate) / (kept.size / kept.mean(axes).size)) ** 0.5
        assert abs(kept.mean(axes) - (1 - rate)).max() < 5 * deviation
    neighbors = np.corrcoef(kept[..., 0::2].ravel(), kept[..., 1::2].ravel())[0, 1]
    assert abs(neighbors) < 0.02  # the two words of one hash


def test_dropout_mask_of_a_row_depends_on_its_key_alone():
    x = jnp.ones((BATCH, SEQ, FEATURES))
    masks = {np.asarray(row).tobytes() for row in GLOBAL_MASK}
    masks |= {np.asarray(row).tobytes() for row in dropout(x, jax.random.split(jax.random.key(9), BATCH), rate=0.3)}
    assert len(masks) == 2 * BATCH
    np.testing.assert_array_equal(dropout(x, KEYS[::-1], rate=0.3), GLOBAL_MASK[::-1])


def test_dropout_gradient_is_the_mask():
    x = jnp.ones((BATCH, SEQ, FEATURES))
    gradient = jax.grad(lambda x: dropout(x, KEYS, rate=0.3).sum())(x)
    np.testing.assert_array_equal(gradient, GLOBAL_MASK)


def test_dropout_keeps_the_dtype_and_rate_zero_is_identity():
    x = jnp.ones((BATCH, SEQ, FEATURES), jnp.bfloat16)
    y = dropout(x, KEYS, rate=0.3)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y != 0, GLOBAL_MASK != 0)
    assert dropout(x, KEYS, rate=0.0) is x


def test_dropout_raises_for_bad_rates_and_keys():
    x = jnp.ones((BATCH, SEQ, FEATURES))
    drop = partial(dropout, x)
    for rate in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="rate is"):
            drop(KEYS, rate=rate)
    with pytest.raises(ValueError, match="threefry2x32"):
        drop(jax.random.split(jax.random.key(0, impl="rbg"), BATCH), rate=0.1)
