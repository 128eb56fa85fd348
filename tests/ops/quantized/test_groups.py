"""Scaled groups against their formula in float64, number by number, with consecutive groups and any."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.ops.quantized.groups import INT8_STEP, get_group_dequantizer, get_nested_dequantizer, quantize_groups
from zoo.ops.quantized.nf4 import CODEBOOK
from zoo.ops.quantized.packed_matmul import packed_matmul

ALL_BYTES = np.arange(256, dtype=np.uint8)


def expected(numbers, scales, zeros, groups):
    numbers, scales, zeros = (np.asarray(x, np.float64) for x in (numbers, scales, zeros))
    return np.float32((numbers - zeros[:, groups]) * scales[:, groups])


@pytest.mark.parametrize(
    ("kind", "numbers", "middle"),
    [
        ("uint8", ALL_BYTES, 128),
        ("uint4", np.stack([ALL_BYTES & 15, ALL_BYTES >> 4], -1).reshape(-1), 8),
        ("float8_e4m3fn", np.where(ALL_BYTES & 127 == 127, 0, ALL_BYTES).astype(np.uint8).view(jnp.float8_e4m3fn), 0),
    ],
)
@pytest.mark.parametrize("indexed", [False, True])
def test_every_code_is_dequantized_by_the_formula(kind, numbers, middle, indexed):
    codes = np.where(ALL_BYTES & 127 == 127, 0, ALL_BYTES).astype(np.uint8) if kind == "float8_e4m3fn" else ALL_BYTES
    draw, size, count = np.random.default_rng(0), 48, len(numbers)
    groups = np.arange(count) // size
    groups = draw.permutation(groups) if indexed else groups
    scales = np.abs(draw.normal(size=(3, groups.max() + 1))).astype(np.float16)
    zeros = draw.integers(0, 256, scales.shape, np.uint8)
    index = (jnp.asarray(groups),) if indexed else ()
    rows = jnp.asarray(np.tile(codes, (3, 1)))
    for stored in (zeros, None):
        given = (rows, jnp.asarray(scales), *(() if stored is None else (jnp.asarray(stored),)), *index)
        decode = get_group_dequantizer(kind, size, has_zeros=stored is not None, indexed=indexed)
        zero = np.full(scales.shape, middle) if stored is None else stored
        wanted = expected(np.tile(numbers, (3, 1)), scales, zero, groups)
        np.testing.assert_array_equal(jax.jit(decode)(*given), wanted)
        half = jax.jit(decode, static_argnums=len(given))(*given, jnp.bfloat16)
        np.testing.assert_array_equal(half, wanted.astype(jnp.bfloat16))


@pytest.mark.parametrize("indexed", [False, True])
def test_nested_nf4_equals_the_formula(indexed):
    """Rows of 3 blocks: step 0 ends, and step 1 begins, inside row 85."""
    draw = np.random.default_rng(0)
    codes, constants = draw.integers(0, 256, (4, 96), np.uint8), draw.integers(0, 256, (4, 3), np.uint8)
    first = 3 * np.arange(84, 88)
    steps_of_rows = lambda steps: steps[np.minimum(first[:, None] // 256 + np.arange(2), 1)]
    steps, table = (np.float32(draw.normal(size=size)) for size in (2, 256))
    index = draw.permutation(np.arange(192) // 64) if indexed else np.arange(192) // 64
    offset = np.float32([0.1])
    scales = table[constants] * steps[(first[:, None] + np.arange(3)) // 256] + offset
    levels = CODEBOOK[np.stack([codes & 15, codes >> 4], -1).reshape(4, -1)]
    decode = jax.jit(get_nested_dequantizer(indexed=indexed))
    places = (first % 256).astype(np.uint8)
    given = (codes, constants, steps_of_rows(steps), places, table, offset, *((index,) if indexed else ()))
    np.testing.assert_array_equal(decode(*given), levels * scales[:, index])
    stacked = decode(*(np.stack([x, x[::-1]]) for x in given))
    np.testing.assert_array_equal(stacked[1], decode(*(x[::-1] for x in given)))


@pytest.mark.parametrize("largest", [7, 3, 1])
def test_groups_are_quantized_to_the_nearest_level(largest):
    weight = np.float32(np.random.default_rng(0).normal(size=(3, 48)))
    weight[1, :16] = 0
    codes, scales = jax.jit(quantize_groups, static_argnums=(1, 2))(weight, 16, largest)
    groups = weight.reshape(3, 3, 16)
    wanted = (np.abs(groups).max(-1) / np.float32(largest)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(scales, wanted)
    levels = np.arange(-largest, largest + 1) * np.float32(wanted)[..., None]
    nearest = np.abs(groups[..., None] - levels[..., None, :]).min(-1)
    decode = get_group_dequantizer("uint4", 16, has_zeros=False, indexed=False)
    decoded = jax.jit(decode)(codes, scales)
    assert codes.shape == (3, 24) and not np.array(decoded[1, :16]).any()
    np.testing.assert_allclose(np.abs(decoded - weight), nearest.reshape(3, 48), atol=1e-6)


def test_signed_bytes_are_parts_of_the_largest():
    decode = get_group_dequantizer("int8", None, has_zeros=False, indexed=False)
    codes, scales = ALL_BYTES[None], np.float32([[0.3]])
    np.testing.assert_array_equal(
        jax.jit(decode)(codes, scales)[0], ALL_BYTES.view(np.int8) * np.float32(0.3) * INT8_STEP
    )


def test_equal_options_give_the_same_function():
    make = lambda size: get_group_dequantizer("uint4", size, has_zeros=True, indexed=False)
    assert make(16) is make(16) and make(16) is not make(32)


def test_tiles_are_dequantized_with_the_shared_index():
    draw = np.random.default_rng(0)
    codes, index = jnp.asarray(draw.integers(0, 256, (7, 24), np.uint8)), jnp.asarray(draw.permutation(24) // 8)
    packed = codes, jnp.asarray(draw.normal(size=(7, 3)), jnp.float32)
    decode = get_group_dequantizer("uint8", 8, has_zeros=False, indexed=True)
    weight, x = decode(*packed, index), jnp.asarray(draw.normal(size=(5, 24)), jnp.float32)

    @jax.jit
    def multiply(x):
        return jax.value_and_grad(
            lambda x: (packed_matmul(x, packed, decode, "oi", shared=(index,), tile_elements=48) ** 2).sum()
        )(x)

    value, gradient = multiply(x)
    np.testing.assert_allclose(value, ((x @ weight.T) ** 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, 2 * x @ weight.T @ weight, rtol=1e-4, atol=1e-2)
