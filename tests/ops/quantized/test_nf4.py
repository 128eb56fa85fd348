"""NF4 against its definition, value by value; quantization rounds to nearest."""

from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.ops.quantized.nf4 import BLOCK_SIZE, CODEBOOK, dequantize_nf4, quantize_nf4

jit_quantize = jax.jit(quantize_nf4)
jit_dequantize = jax.jit(dequantize_nf4)


def by_definition(codes, constants, offset, step):
    """Dequantize nibble by nibble, in Python floats."""
    numbers = np.zeros((*constants.shape, BLOCK_SIZE))
    for index in np.ndindex(codes.shape):
        constant = float(offset[index[:-2]]) + float(step[index[:-2]]) * int(constants[index[:-1]])
        for half in range(2):
            numbers[*index[:-1], 2 * index[-1] + half] = constant * float(
                CODEBOOK[(int(codes[index]) >> 4 * half) & 15]
            )
    return numbers.reshape(*constants.shape[:-1], -1)


def test_nf4_codebook_is_normal_quantiles():
    """Quantiles evenly spaced in probability on either side of zero, from 1 - 0.9677, divided by the largest."""
    quantile, tail = NormalDist().inv_cdf, 0.9677083
    above = [quantile(p) for p in np.linspace(tail, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(tail, 0.5, 8)[:-1]]
    np.testing.assert_allclose(np.sort([*above, *below, 0.0]) / max(above), CODEBOOK, atol=2e-7)
    assert CODEBOOK[7] == 0 and CODEBOOK[0] == -1 and CODEBOOK[15] == 1


def test_dequantize_nf4_of_every_byte():
    codes = np.arange(256, dtype=np.uint8).reshape(2, 4, 32)
    constants = np.array([[0, 1, 128, 255], [255, 0, 7, 9]], np.uint8)
    offset, step = np.array([0.5, 0.0], np.float32), np.array([0.25, 2.0], np.float32)
    expected = by_definition(codes, constants, offset, step)
    np.testing.assert_allclose(jit_dequantize(codes, constants, offset, step), expected, rtol=3e-7)
    half = dequantize_nf4(*map(jnp.asarray, (codes, constants, offset, step)), jnp.bfloat16)
    np.testing.assert_allclose(half.astype(jnp.float32), expected, rtol=2**-8)


numbers = st.floats(-(2.0**60), 2.0**60, width=32) | st.sampled_from([0.0, 1.0, -0.7, 0.33, 2.0**-60])


@given(values=st.lists(numbers, min_size=12, max_size=12), seed=st.integers(0, 99))
def test_quantize_nf4_rounds_to_nearest(values, seed):
    """Blocks of normal values with very different scales, and some values of any size."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(2, 3 * BLOCK_SIZE)) * np.repeat(10.0 ** random.integers(-3, 3, (2, 3)), BLOCK_SIZE, axis=1)
    x[:, random.integers(0, 3 * BLOCK_SIZE, 6)] = np.reshape(values, (2, 6))
    x[1, :BLOCK_SIZE] = 0
    x = x.astype(np.float32)
    codes, constants, offset, step = map(np.asarray, jit_quantize(x))
    assert codes.shape == (2, 3, 32) and constants.shape == (2, 3) and offset.shape == step.shape == (2,)
    found = by_definition(codes, constants, offset, step).reshape(2, 3, BLOCK_SIZE)
    np.testing.assert_array_equal(found[1, 0], 0)
    for row, (own, new) in enumerate(zip(x.reshape(2, 3, BLOCK_SIZE).astype(np.float64), found, strict=True)):
        largest = np.abs(own).max(1)
        slack = 1e-6 * largest.max()
        constant = float(offset[row]) + float(step[row]) * constants[row].astype(np.float64)
        assert (np.abs(constant - largest) <= float(step[row]) / 2 + slack).all()
        nearest = np.abs(own[..., None] - constant[:, None, None] * CODEBOOK.astype(np.float64)).min(-1)
        assert (np.abs(own - new) <= nearest + slack).all()
        assert (np.abs(own - new) <= 0.152 * largest[:, None] + largest.max() / 510 + slack).all()


def test_nf4_error_of_normal_weights_is_7_percent():
    """The mean error equals that in float64 with unquantized constants, whose rounding adds little."""
    x = np.random.default_rng(0).normal(size=(64, 1024))
    blocks = x.reshape(-1, BLOCK_SIZE)
    constants = np.abs(blocks).max(1, keepdims=True)
    book = CODEBOOK.astype(np.float64)
    exact = book[np.abs(blocks[..., None] / constants[..., None] - book).argmin(-1)] * constants
    expected = np.abs(exact - blocks).mean()
    assert 0.071 < expected < 0.075
    found = np.abs(np.asarray(dequantize_nf4(*quantize_nf4(jnp.asarray(x, jnp.float32))), np.float64) - x).mean()
    assert abs(found - expected) < 0.002 * expected


def test_nf4_bits_per_value():
    packed = jax.eval_shape(quantize_nf4, jax.ShapeDtypeStruct((8, 4096), jnp.float32))
    assert sum(x.size * x.dtype.itemsize * 8 for x in packed) / (8 * 4096) == 4 + 8 / 64 + 64 / 4096


def test_nf4_low_nibble_comes_first():
    x = jnp.zeros((1, 64)).at[0, :3].set(jnp.array([-1.0, 1.0, 1.0]))
    codes, *_ = quantize_nf4(x)
    assert codes[0, 0, :3].tolist() == [0xF0, 0x7F, 0x77]


def test_quantize_nf4_of_a_non_finite_row_is_nan():
    x = jnp.ones((3, 128)).at[0, 3].set(jnp.nan).at[1, 70].set(-jnp.inf)
    assert jnp.isnan(dequantize_nf4(*quantize_nf4(x))).all(-1).tolist() == [True, True, False]


def test_quantize_nf4_raises_for_partial_blocks():
    with pytest.raises(ValueError, match="blocks of 64, and 96 numbers are not a whole number of blocks: take int8"):
        quantize_nf4(jnp.zeros((2, 96)))
