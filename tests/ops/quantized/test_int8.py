"""Int8 against its definition, row by row; quantization rounds to nearest."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zoo.ops.quantized.int8 import dequantize_int8, quantize_int8

numbers = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.0, 1.0, -127.0, 63.5, 2.0**-100])
coded = jax.jit(quantize_int8)


@given(values=st.lists(numbers, min_size=30, max_size=30))
def test_quantize_int8_rounds_to_nearest(values):
    x = np.array(values, np.float32).reshape(2, 3, 5)
    codes, scales = coded(x)
    assert codes.dtype == jnp.int8 and codes.shape == (2, 3, 5) and scales.shape == (2, 3)
    found = np.asarray(dequantize_int8(codes, scales), np.float64)
    for own, new, scale in zip(x.reshape(6, 5).astype(np.float64), found.reshape(6, 5), scales.reshape(6), strict=True):
        largest = np.abs(own).max()
        assert abs(scale - largest / 127) <= 1e-6 * largest
        possible = np.arange(-127, 128) * float(scale)
        nearest = np.abs(own[:, None] - possible).min(1)
        assert (np.abs(own - new) <= nearest + 1e-6 * largest).all()
        assert (np.abs(own - new) <= largest * (1 / 254 + 1e-6)).all()


def test_dequantize_int8_multiplies_codes_by_scales():
    codes, scales = jnp.array([[127, -127, 0, 3], [1, 2, -3, 0]], jnp.int8), jnp.array([0.5, 2.0])
    assert dequantize_int8(codes, scales).tolist() == [[63.5, -63.5, 0, 1.5], [2, 4, -6, 0]]
    assert dequantize_int8(codes, scales, jnp.bfloat16).dtype == jnp.bfloat16
    again = quantize_int8(jnp.array([[63.5, -63.5, 0, 1.5], [0, 0, 0, 0]]))
    assert again[0].tolist() == [[127, -127, 0, 3], [0, 0, 0, 0]] and again[1].tolist() == [0.5, 0]


def test_quantize_int8_of_a_non_finite_row_is_nan():
    x = jnp.zeros((3, 8)).at[0, 3].set(jnp.nan).at[1, 4].set(-jnp.inf)
    assert jnp.isnan(dequantize_int8(*quantize_int8(x))).all(-1).tolist() == [True, True, False]
