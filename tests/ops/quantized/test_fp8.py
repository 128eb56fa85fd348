"""FP8 and FP4 formats: bit for bit those of ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from zoo.ops.quantized.fp8 import find_multiplier, quantize_per_tensor, saturating_cast

FORMATS = {"float8_e4m3fn": 8, "float8_e5m2": 8, "float4_e2m1fn": 4}
EDGES = [0, -0.0, 1e-30, 448, 449, 464, 465, 480, 57344, 61440, 61441, 6, 6.5, -7, 3e38, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("name", FORMATS)
def test_cast_matches_ml_dtypes_bit_for_bit(name):
    """Random values over all exponents, all midpoints between neighbors, subnormals, saturation and what is not
    finite."""
    dtype = getattr(ml_dtypes, name)
    codes = np.arange(2 ** FORMATS[name], dtype=np.uint8).view(dtype).astype(np.float32)
    finite = np.sort(codes[np.isfinite(codes)])
    random = np.random.default_rng(0)
    spread = random.normal(size=4000) * np.exp2(random.uniform(-20, 20, 4000))
    x = np.float32(np.concatenate([codes, (finite[1:] + finite[:-1]) / 2, spread, EDGES]))
    if name == "float4_e2m1fn":
        x = x[np.isfinite(x)]  # which it has no codes for
    largest = float(ml_dtypes.finfo(dtype).max)
    expected = np.where(np.isfinite(x), np.clip(x, -largest, largest), x).astype(dtype)
    actual = np.asarray(jax.jit(saturating_cast, static_argnums=1)(jnp.asarray(x), jnp.dtype(name)))
    is_nan = np.isnan(expected.astype(np.float32))
    assert (actual.view(np.uint8) == expected.view(np.uint8))[~is_nan].all()
    assert np.isnan(actual.astype(np.float32)[is_nan]).all()
    merged = np.asarray(jax.jit(lambda x: saturating_cast(x, jnp.dtype(name)).astype(jnp.float32))(jnp.asarray(x)))
    np.testing.assert_array_equal(merged, expected.astype(np.float32))
    decoded = np.asarray(jax.jit(lambda x: x.astype(jnp.float32))(jnp.asarray(codes.astype(dtype))))
    np.testing.assert_array_equal(decoded, codes)


def test_scale_of_zeros_is_one_and_nan_propagates():
    assert find_multiplier(jnp.float32(0), 448) == 1
    assert jnp.isfinite(1 / find_multiplier(jnp.float32(1e-38), 448))
    for amax in (np.inf, np.nan):
        quantized = quantize_per_tensor(jnp.array([1.0, amax]), jnp.float32(amax), jnp.float8_e4m3fn)
        assert jnp.isnan(quantized.values.astype(jnp.float32)).all()
