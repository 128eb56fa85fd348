"""Storage formats of moments against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo import train
from zoo.parallel import Dim
from zoo.parallel.module import Leaf
from zoo.train.optimizer.moments import make_dynamic_map

KEY = jax.random.key(0)
MATRIX = Leaf("weight", (Dim("layers"), Dim("mlp"), Dim("embed")), num_stacked=1)


@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_map_follows_its_definition(signed):
    """A sign, then zeros that count the decade, an indicator bit, and the rest a linear fraction (figure 2)."""
    expected = {0.0, 1.0}
    for zeros in range(7):
        bits = (6 if signed else 7) - zeros  # of the fraction
        for fraction in range(2**bits):
            value = 10.0**-zeros * (0.1 + 0.9 * (fraction + 0.5) / 2**bits)
            expected |= {value, -value} if signed else {value}
    values = make_dynamic_map(signed=signed)
    assert len(values) == 256
    np.testing.assert_allclose(values, sorted(expected), rtol=1e-6)


@pytest.mark.parametrize("size", [32, 40])
def test_blockwise_codes_are_nearest_in_each_block(size):
    """Blocks of 16 along `mlp`, the dim that is not embed; the last of 40 values is shorter."""
    x = np.array(jax.random.normal(KEY, (2, size, 8))) * np.logspace(-3, 2, 8, dtype=np.float32)
    x[:, :16, 0] = 0
    moment = train.BlockwiseMoment(block=16, min_size=1)
    stored = moment.encode(MATRIX, jnp.asarray(x), KEY)
    assert (stored.codes.shape, stored.codes.dtype) == (x.shape, jnp.uint8)
    assert stored.scales.shape == (2, -(-size // 16), 8)
    decoded, values = np.array(moment.decode(MATRIX, stored)), make_dynamic_map(signed=True)
    for start in range(0, size, 16):
        block = x[:, start : start + 16]
        scale = np.abs(block).max(1, keepdims=True)
        nearest = np.abs(block[..., None] / np.where(scale == 0, 1, scale)[..., None] - values).min(-1)
        error = np.abs(decoded[:, start : start + 16] - block) / np.where(scale == 0, 1, scale)
        np.testing.assert_allclose(error, nearest, atol=1e-6)
    assert (decoded[:, :16, 0] == 0).all()


def test_small_parameters_stay_in_float32():
    x = jnp.ones((2, 8, 8))
    assert train.BlockwiseMoment(min_size=65).encode(MATRIX, x, KEY) is x


def test_bfloat16_average_does_not_stall():
    """An average with b2 = 0.999 moves from 0 to 1; rounded to nearest it would stop at 0.5."""

    def run(encode):
        step = lambda v, key: (encode(0.999 * v.astype(jnp.float32) + 0.001, key), None)
        return jax.lax.scan(step, jnp.zeros(512, jnp.bfloat16), jax.random.split(KEY, 3000))[0].astype(jnp.float32)

    leaf = Leaf("weight", (Dim("embed"),))
    stochastic = run(lambda x, key: train.BFloat16Moment().encode(leaf, x, key))
    assert abs(stochastic.mean() - (1 - 0.999**3000)) < 2e-3
    assert run(lambda x, key: x.astype(jnp.bfloat16)).max() < 0.6
