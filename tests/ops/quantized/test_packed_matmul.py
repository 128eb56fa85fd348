"""Packed matrix products equal those with dequantized matrices, in values and gradients, for any group sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int8, UInt8

import zoo
from tests.jaxprs import arrays
from zoo.ops.moe.grouped_matmul import grouped_matmul_implementation, grouped_matmul_reference
from zoo.ops.quantized import int8, mxfp4, nf4
from zoo.ops.quantized.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from zoo.ops.quantized.packed_matmul import grouped_packed_matmul, packed_matmul
from zoo.parallel.collectives import shard_offset

FORMATS = {
    "mxfp4": (mxfp4.quantize_mxfp4, mxfp4.dequantize_mxfp4),
    "nf4": (nf4.quantize_nf4, nf4.dequantize_nf4),
    "int8": (int8.quantize_int8, int8.dequantize_int8),
}
GROUP_SIZES = {
    "even": (300, [100, 100, 100]),
    "one expert has all, in several blocks": (300, [0, 300, 0]),
    "rows beyond all groups": (300, [150, 0, 7]),
    "no expert has rows": (5, [0, 0, 0]),
    "few": (5, [1, 0, 4]),
}


def matrices(experts, out, in_size):
    return quantize_mxfp4(jax.random.normal(jax.random.key(1), (experts, out, in_size)) / 8)


@jax.jit
def value_and_gradient(x, blocks, scales, sizes, cotangent):
    y, back = jax.vjp(lambda x: grouped_packed_matmul(x, (blocks, scales), dequantize_mxfp4, sizes), x)
    return y, *back(cotangent)


@jax.jit
def expected_of(x, weight, sizes, cotangent):
    y, back = jax.vjp(lambda x: grouped_matmul_reference(x, weight, sizes), x)
    return y, *back(cotangent)


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", GROUP_SIZES)
def test_grouped_packed_matmul_equals_the_reference(case, dtype):
    rows, sizes = GROUP_SIZES[case]
    keys, sizes = jax.random.split(jax.random.key(0)), jnp.array(sizes)
    x, cotangent = jax.random.normal(keys[0], (rows, 64), dtype), jax.random.normal(keys[1], (rows, 5), dtype)
    blocks, scales = matrices(3, 5, 64)
    result = value_and_gradient(x, blocks, scales, sizes, cotangent)
    wanted = expected_of(x, dequantize_mxfp4(blocks, scales), sizes, cotangent)
    for ours, theirs in zip(result, wanted, strict=True):
        assert ours.dtype == dtype
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        # as for grouped_matmul: bfloat16 rounds once, float32 differs in the order of sums
        tolerance = (2**-8 if dtype == jnp.bfloat16 else 1e-6) * max(1.0, np.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, atol=tolerance)


@pytest.mark.one_case("slow")
@pytest.mark.parametrize(("quantize", "dequantize"), FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("subscripts", ["oi", "io"])
@pytest.mark.parametrize(
    ("tile_elements", "rows"), [(64 * 11, 11), (64 * 4, 4), pytest.param(1, 1, marks=pytest.mark.slow)]
)
def test_packed_matmul_equals_dequantized_matmul(quantize, dequantize, subscripts, tile_elements, rows):
    """One tile, or tiles that do not divide the matrix: the last overlaps, and counts nothing twice."""
    packed = quantize(jax.random.normal(jax.random.key(1), (11, 64)) / 8)
    weight = dequantize(*packed)
    x = jax.random.normal(jax.random.key(0), (7, 64 if subscripts == "oi" else 11))
    matrix = weight.T if subscripts == "oi" else weight

    def run(x):
        y, back = jax.vjp(lambda x: packed_matmul(x, packed, dequantize, subscripts, tile_elements=tile_elements), x)
        return y, back(y)[0]

    y, gradient = map(np.asarray, jax.jit(run)(x))
    matrix = np.asarray(matrix)
    assert np.allclose(y, np.asarray(x) @ matrix, atol=1e-6)
    assert np.allclose(gradient, y @ matrix.T, atol=1e-5)
    held = [x.shape for x in arrays(jax.make_jaxpr(run)(x)) if x.dtype == jnp.float32 and x.shape[-1:] == (64,)]
    assert (rows, 64) in held and max(shape[0] for shape in held) == max(rows, len(x))


@pytest.mark.parametrize("subscripts", ["oi", "io"])
def test_packed_matmul_of_bfloat16_sums_tiles_in_float32(subscripts):
    packed = int8.quantize_int8(jax.random.normal(jax.random.key(1), (64, 64)))
    x = jax.random.normal(jax.random.key(0), (7, 64), jnp.bfloat16)
    weight = int8.dequantize_int8(*packed, jnp.bfloat16).astype(jnp.float32)
    expected = x.astype(jnp.float32) @ (weight.T if subscripts == "oi" else weight)
    found = packed_matmul(x, packed, int8.dequantize_int8, subscripts, tile_elements=64)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2**-8, atol=1e-5)


def test_packed_matmul_holds_one_tile_and_saves_none():
    """A matrix of 64 kB in float32 in tiles of 4 kB: no dequantized array is larger than a tile."""
    packed = nf4.quantize_nf4(jax.random.normal(jax.random.key(1), (256, 64)))
    x = jnp.ones((2, 64))

    def held(product):
        gradient = jax.jit(jax.grad(lambda x, packed: (product(x, packed) ** 2).sum()))
        return gradient.lower(x, packed).compile().memory_analysis().temp_size_in_bytes

    assert held(lambda x, packed: packed_matmul(x, packed, nf4.dequantize_nf4, "oi", tile_elements=1024)) < 32 * 1024
    assert held(lambda x, packed: x @ nf4.dequantize_nf4(*packed).T) > 64 * 1024


def test_grouped_packed_matmul_dequantizes_one_expert_at_a_time():
    """64 matrices of 16 kB in float32: forward and backward passes hold only a few of them."""
    x, sizes = jnp.ones((4, 64)), jnp.zeros(64, int).at[9].set(3).at[60].set(1)
    blocks, scales = matrices(64, 64, 64)
    gradient = jax.grad(lambda x: (grouped_packed_matmul(x, (blocks, scales), dequantize_mxfp4, sizes) ** 2).sum())
    program = jax.jit(gradient).lower(x).compile()
    assert program.memory_analysis().temp_size_in_bytes < 6 * 64 * 64 * 4


class PackedExperts(zoo.parallel.Module):
    blocks: UInt8[Array, "choices out chunk 16"] = zoo.parallel.buffer()
    scales: UInt8[Array, "choices out chunk"] = zoo.parallel.buffer()
    gain: Float[Array, "in"]


def test_grouped_packed_matmul_refuses_a_named_implementation():
    arrays = (jnp.zeros((2, 4, 1, 16), jnp.uint8), jnp.zeros((2, 4, 1), jnp.uint8))
    with grouped_matmul_implementation("ragged"), pytest.raises(ValueError, match="'ragged' .* matrices are packed"):
        grouped_packed_matmul(jnp.zeros((3, 32)), arrays, dequantize_mxfp4, jnp.array([1, 2]))


@pytest.mark.slow
def test_grouped_packed_matmul_on_a_mesh():
    """Rows and groups are sharded, and gradients flow to parameters before the product."""
    model = PackedExperts(*matrices(2, 5, 32), jnp.linspace(0.5, 2, 32))
    x = jax.random.normal(jax.random.key(0), (8, 40, 32))
    sizes = jnp.array([[40, 0], [3, 30], [0, 0], [20, 20], [0, 40], [39, 1], [1, 1], [13, 17]])

    def loss(model, x, sizes):
        loss_of_rows = lambda x, sizes: (
            grouped_packed_matmul(x * model.gain, (model.blocks, model.scales), dequantize_mxfp4, sizes) ** 2
        ).sum()
        return sum(loss_of_rows(*each) for each in zip(x, sizes, strict=True)), jnp.float32(1)

    def reference(gain):
        weight = dequantize_mxfp4(model.blocks, model.scales)
        return sum(
            (grouped_matmul_reference(x * gain, weight, sizes) ** 2).sum() / 8
            for x, sizes in zip(x, sizes, strict=True)
        )

    found = zoo.value_and_grad(loss, zoo.make_mesh(data=8))(model, x, sizes)
    expected = jax.value_and_grad(reference)(model.gain)
    assert jnp.allclose(found[0], expected[0], rtol=1e-6)
    assert jnp.allclose(found[1].gain, expected[1], rtol=1e-5)
    assert found[1].blocks is None


class PackedLinear(zoo.parallel.Module):
    codes: Int8[Array, "out mlp"] = zoo.parallel.buffer()
    scales: Float[Array, "out"] = zoo.parallel.buffer()
    gain: Float[Array, "mlp"]


def test_packed_matmul_on_a_mesh():
    """The contracted dim, which is the dim of the gradient, is sharded."""
    weight = jax.random.normal(jax.random.key(1), (12, 16))
    model = PackedLinear(*int8.quantize_int8(weight), jnp.linspace(0.5, 2, 16))
    x = jax.random.normal(jax.random.key(0), (8, 16))

    def loss(model, x):
        own = shard_offset(model.gain, "mlp", len(model.gain)) + jnp.arange(len(model.gain))
        y = packed_matmul(
            x[:, own] * model.gain, (model.codes, model.scales), int8.dequantize_int8, "oi", tile_elements=40
        )
        return (zoo.parallel.reduce(y, over="mlp") ** 2).sum(), jnp.float32(len(x))

    def reference(gain):
        return (((x * gain) @ int8.dequantize_int8(model.codes, model.scales).T) ** 2).sum() / 8

    mesh = zoo.make_mesh(data=2, tensor=4)
    found = zoo.value_and_grad(loss, mesh)(zoo.place(model, mesh), x)
    expected = jax.value_and_grad(reference)(model.gain)
    assert jnp.allclose(found[0], expected[0], rtol=1e-6)
    assert jnp.allclose(found[1].gain, expected[1], rtol=1e-5)
    assert found[1].scales is None
