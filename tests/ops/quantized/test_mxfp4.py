"""MXFP4 against its definition, value by value; quantization rounds to nearest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.ops.quantized.mxfp4 import dequantize_mxfp4, dequantize_mxfp4_numpy, quantize_mxfp4

GRID = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
SHAPE = (3, 2, 16)
ALL_BYTES = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (256, 16, 16))
ALL_SCALES = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 16)).copy()


def by_definition(blocks, scales):
    """Dequantize nibble by nibble, in Python floats."""
    numbers = np.zeros((*blocks.shape[:-1], 32))
    for place in np.ndindex(blocks.shape):
        for half in range(2):
            bits = (int(blocks[place]) >> 4 * half) & 15
            power = float("nan") if scales[place[:-1]] == 255 else 2.0 ** (int(scales[place[:-1]]) - 127)
            numbers[*place[:-1], 2 * place[-1] + half] = (-1) ** (bits >> 3) * GRID[bits & 7] * power
    return numbers.reshape(*blocks.shape[:-2], -1)


@pytest.fixture(scope="module")
def expected():
    """Return every byte with every scale, one scale per row."""
    return by_definition(ALL_BYTES, ALL_SCALES)


@pytest.mark.parametrize(
    ("dtype", "first", "last"), [(jnp.float32, 2, 252), (jnp.bfloat16, 2, 252), (jnp.float16, 104, 140)]
)
def test_dequantize_mxfp4_of_every_byte_and_scale(expected, dtype, first, last):
    found = jax.jit(dequantize_mxfp4, static_argnums=2)(jnp.asarray(ALL_BYTES), jnp.asarray(ALL_SCALES), dtype)
    assert found.dtype == dtype
    found = np.asarray(found, np.float64)
    assert np.array_equal(found[first : last + 1], expected[first : last + 1])
    assert not np.array_equal(found[last + 1], expected[last + 1]), "6 times this overflows"
    assert np.isnan(found[255]).all()


def test_dequantize_mxfp4_numpy_equals_jax(expected):
    found = dequantize_mxfp4_numpy(ALL_BYTES, ALL_SCALES)
    assert found.dtype == np.float32
    assert np.array_equal(found[:253], expected[:253]) and np.isnan(found[255]).all()


def test_mxfp4_low_nibble_comes_first():
    blocks = jnp.array([[0x21, 0xF7, *[0] * 14]], jnp.uint8)  # of one block
    assert dequantize_mxfp4(blocks, jnp.array([128], jnp.uint8))[:5].tolist() == [1.0, 2.0, 12.0, -12.0, 0.0]


numbers = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.0, 1.0, -2.5, 5.0, 3.5, 7.9, 2.0**-120])
coded = jax.jit(quantize_mxfp4)


@given(values=st.lists(numbers, min_size=96, max_size=96))
def test_quantize_mxfp4_rounds_to_nearest(values):
    x = np.array(values, np.float32).reshape(3, 32)
    blocks, scales = coded(x)
    assert blocks.shape == (3, 1, 16) and scales.shape == (3, 1)
    found = dequantize_mxfp4_numpy(np.asarray(blocks), np.asarray(scales)).astype(np.float64)
    largest = np.abs(x).max(1)
    for row, (own, new) in enumerate(zip(x.astype(np.float64), found, strict=True)):
        possible = np.array(GRID) * 2.0 ** (int(scales[row, 0]) - 127)
        possible = np.concatenate([possible, -possible])
        assert np.array_equal(np.abs(own - new), np.abs(own[:, None] - possible).min(1))
        assert (np.abs(own - new) <= largest[row] / 4).all()
        assert scales[row, 0] == 0 or 4 <= largest[row] / possible[2] < 8


@given(drawn=st.binary(min_size=102, max_size=102))
def test_quantize_mxfp4_of_dequantized_values_is_lossless(drawn):
    """Bytes may differ for a block without large values; values and signs of zeros do not."""
    drawn = np.frombuffer(drawn, np.uint8)
    blocks, scales = drawn[:96].reshape(SHAPE), np.clip(drawn[96:].reshape(SHAPE[:2]), 5, 252)
    values = dequantize_mxfp4_numpy(blocks, scales)
    again = dequantize_mxfp4_numpy(*map(np.asarray, coded(values)))
    assert again.tobytes() == values.tobytes()


def test_quantize_mxfp4_rounds_ties_to_even():
    x = jnp.array([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, *[0] * 22])
    assert dequantize_mxfp4(*quantize_mxfp4(x))[:10].tolist() == [4, 0, 1, 1, 2, 2, 4, 4, 0, -4]


def test_quantize_mxfp4_of_a_non_finite_block_is_nan():
    x = jnp.zeros((3, 64)).at[0, 3].set(jnp.nan).at[1, 40].set(-jnp.inf)
    assert jnp.isnan(dequantize_mxfp4(*quantize_mxfp4(x))).reshape(3, 2, 32).all(-1).tolist() == [
        [1, 0],
        [0, 1],
        [0, 0],
    ]


def test_quantize_mxfp4_raises_for_partial_blocks():
    with pytest.raises(ValueError, match="blocks of 32, and 48 numbers"):
        quantize_mxfp4(jnp.zeros((2, 48)))
