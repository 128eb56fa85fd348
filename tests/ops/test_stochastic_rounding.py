"""Stochastic rounding: neighbors with the right probabilities, exact values kept, in every format."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick import mark_slow
from zoo.ops.stochastic_rounding import _round_by_spacing, stochastic_round

FORMATS = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")


@pytest.mark.parametrize("name", mark_slow(FORMATS, but=("bfloat16", "float8_e4m3fn", "float4_e2m1fn")))
def test_values_of_the_format_stay_as_they_are(name):
    width = 4 if name.startswith("float4") else jnp.dtype(name).itemsize * 8
    codes = np.arange(2**width).astype(f"uint{max(width, 8)}")
    values = codes.view(jnp.dtype(name)).astype(np.float32)
    finite = values[np.isfinite(values)]
    for bits in (0, 2**32 - 1):
        rounded = stochastic_round(jnp.asarray(finite), jnp.full(finite.shape, bits, jnp.uint32), name)
        assert (np.asarray(rounded).astype(np.float32) == finite).all()


def test_bfloat16_equals_the_formula():
    """Bit for bit, but for zeros, which keep their sign, and for subnormals, which arithmetic flushes on a CPU."""
    words = np.random.default_rng(0).integers(0, 2**32, 2**16, np.uint32)
    words = np.concatenate([words, words & 0xFFFF0000, words | 0xFFFF])  # none, and all but one, of the spacing
    x, tiny = jnp.asarray(words.view(np.float32)), np.finfo(np.float32).tiny
    for bits in (jax.random.bits(jax.random.key(0), x.shape, jnp.uint32), jnp.uint32(0), jnp.uint32(2**32 - 1)):
        bits = jnp.broadcast_to(bits, x.shape)
        y = stochastic_round(x, bits, "bfloat16").astype(jnp.float32)
        expected = _round_by_spacing(x, bits, "bfloat16").astype(jnp.float32)
        is_normal = np.abs(words.view(np.float32)) >= tiny
        np.testing.assert_array_equal(np.asarray(y)[is_normal], np.asarray(expected)[is_normal])
        assert np.isnan(y).sum() == np.isnan(words.view(np.float32)).sum() > 0


@pytest.mark.parametrize("name", mark_slow(FORMATS, but=("bfloat16", "float8_e4m3fn", "float4_e2m1fn")))
def test_rounding_is_unbiased_by_chi_square(name):
    """The counts of both neighbors agree with the distances to them: chi-square with one degree of freedom per value,
    40 values of all magnitudes, below its 99.99% quantile of 85.6."""
    count = 4096
    limit = min(float(jnp.finfo(name).max), 1e4) / 2
    magnitudes = np.exp(np.linspace(np.log(limit / 2**9), np.log(limit), 40))
    values = (magnitudes * (-1.0) ** np.arange(40)).astype(np.float32)
    bits = jax.random.bits(jax.random.key(1), (count, 40), jnp.uint32)
    rounded = np.asarray(stochastic_round(jnp.broadcast_to(values, (count, 40)), bits, name)).astype(np.float64)
    low, high = rounded.min(0), rounded.max(0)
    assert ((low <= values) & (values <= high)).all()
    statistic = 0.0
    for column, (down, up, value) in enumerate(zip(low, high, values.astype(np.float64), strict=True)):
        assert set(np.unique(rounded[:, column])) <= {down, up}  # no more than two neighbors
        if up == down:
            continue
        expected = count * (value - down) / (up - down)
        observed = (rounded[:, column] == up).sum()
        statistic += (observed - expected) ** 2 * (1 / expected + 1 / (count - expected))
    assert 0 < statistic < 85.6


def test_overflow_saturates_or_is_infinite_as_the_format_says():
    x = jnp.array([500, -500, np.inf, np.nan, 3.4e38], jnp.float32)
    down, up = jnp.zeros(5, jnp.uint32), jnp.full(5, 2**32 - 1, jnp.uint32)
    assert stochastic_round(x, up, "float8_e4m3fn").astype(jnp.float32).tolist()[:2] == [448, -448]
    assert np.isnan(np.asarray(stochastic_round(x, up, "float8_e4m3fn")[3]).astype(np.float32))
    to_bfloat16 = lambda bits: np.asarray(stochastic_round(x, bits, "bfloat16").astype(jnp.float32))
    np.testing.assert_array_equal(to_bfloat16(up)[2:], [np.inf, np.nan, np.inf])
    assert np.isfinite(to_bfloat16(down)[4])


def test_more_significant_bits_raise():
    with pytest.raises(ValueError, match="float16 has 11 significant bits"):
        stochastic_round(jnp.ones(1), jnp.zeros(1, jnp.uint32), "float16")
