"""Grouped matrix products equal the reference, in values and gradients, for any group sizes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array, Float

import zoo
from tests.aot import compile_for
from tests.quick import mark_slow
from zoo.ops.moe import grouped_matmul
from zoo.ops.moe.grouped_matmul import (
    expand_group_values,
    find_row_experts,
    grouped_matmul_masked,
    grouped_matmul_padded,
    grouped_matmul_ragged,
    grouped_matmul_reference,
)

IMPLEMENTATIONS = {
    "padded": grouped_matmul_padded,
    "ragged": grouped_matmul_ragged,
    "masked": grouped_matmul_masked,
}
SHAPES = [(5, 1, 3, 4), (12, 3, 4, 6), (8, 8, 4, 4), (300, 4, 3, 5), (600, 2, 3, 2)]
"""Rows, experts, in, out: without buckets and with, one block of overflow and several."""


@partial(jax.jit, static_argnums=0)
def value_and_gradients(implementation, x, weight, sizes, cotangent):
    y, back = jax.vjp(lambda x, weight: implementation(x, weight, sizes), x, weight)
    return y, *back(cotangent)


def draw_group_sizes(load, rows, experts, seed):
    """Return the number of rows of each expert."""
    draw = np.random.default_rng(seed)
    match load:
        case "even":
            return np.full(experts, rows // experts)
        case "one":
            return np.eye(experts, dtype=int)[seed % experts] * rows
        case "few":
            return draw.multinomial(rows, np.eye(experts)[0] * 0.7 + 0.3 / experts)
        case "some are missing":
            return draw.multinomial(rows // 2, np.full(experts, 1 / experts))
    return np.zeros(experts, int)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("shape", "dtype"),
    mark_slow(
        [(shape, dtype) for shape in SHAPES for dtype in (jnp.float32, jnp.bfloat16)],
        but=[(SHAPES[1], jnp.float32), (SHAPES[3], jnp.bfloat16)],
    ),
)
@settings(max_examples=5)
@given(
    load=st.sampled_from(["even", "one", "few", "some are missing", "none"]),
    seed=st.integers(0, 99),
)
def test_grouped_matmul_equals_the_reference_with_gradients(shape, load, dtype, seed):
    rows, experts, in_size, out_size = shape
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (rows, in_size), dtype)
    weight = jax.random.normal(keys[1], (experts, out_size, in_size), dtype)
    cotangent = jax.random.normal(keys[2], (rows, out_size), dtype)
    sizes = jnp.asarray(draw_group_sizes(load, rows, experts, seed), jnp.int32)
    expected = value_and_gradients(grouped_matmul_reference, x, weight, sizes, cotangent)
    for name, implementation in IMPLEMENTATIONS.items():
        result = value_and_gradients(implementation, x, weight, sizes, cotangent)
        for ours, theirs in zip(result, expected, strict=True):
            assert ours.dtype == dtype
            ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
            # bfloat16: sums in float32, rounded once, so up to one unit of 2^-8 of the largest; float32: their order
            scale = max(1.0, np.abs(theirs).max())
            tolerance = (2**-8 if dtype == jnp.bfloat16 else 1e-6) * scale
            np.testing.assert_allclose(ours, theirs, atol=tolerance, err_msg=name)


def test_grouped_matmul_is_padded_on_cpus():
    x, weight, sizes = jnp.ones((6, 2)), jnp.ones((3, 4, 2)), jnp.array([1, 2, 3])
    program = jax.jit(grouped_matmul.grouped_matmul).lower(x, weight, sizes).as_text()
    assert "ragged" not in program
    assert jnp.array_equal(grouped_matmul.grouped_matmul(x, weight, sizes), grouped_matmul_reference(x, weight, sizes))


def test_grouped_matmul_padded_reads_no_matrix_without_rows():
    """Two rows and 512 experts: the weights are not copied, and the FLOPs are those of two rows."""
    x, weight, sizes = jnp.ones((2, 64)), jnp.ones((512, 64, 64)), jnp.zeros(512, int).at[7].set(2)
    program = jax.jit(grouped_matmul_padded).lower(x, weight, sizes).compile()
    assert program.memory_analysis().temp_size_in_bytes < weight.nbytes / 50
    assert program.cost_analysis()["flops"] < 10 * 2 * 2 * 64 * 64


def test_grouped_matmul_padded_raises_for_forward_mode():
    x, weight, sizes = jnp.ones((6, 2)), jnp.ones((3, 4, 2)), jnp.array([1, 2, 3])
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: grouped_matmul.grouped_matmul(x, weight, sizes), (x,), (x,))


def test_expand_group_values_and_find_row_experts():
    sizes = jnp.array([2, 0, 3])
    assert find_row_experts(sizes, 7).tolist() == [0, 0, 2, 2, 2, 3, 3]
    values = jnp.arange(6.0).reshape(3, 2)
    assert expand_group_values(values, sizes, 7).tolist() == [[0, 1], [0, 1], [4, 5], [4, 5], [4, 5], [0, 0], [0, 0]]
    _, back = jax.vjp(lambda v: expand_group_values(v, sizes, 7), values)
    assert back(jnp.ones((7, 2)))[0].tolist() == [[2, 2], [0, 0], [3, 3]]


class Matrices(zoo.parallel.Module):
    weight: Float[Array, "choices out in"]


@pytest.mark.one_case
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_grouped_matmul_on_a_mesh(implementation):
    """Rows and groups are sharded, and the gradient of the replicated matrices is all-reduced."""
    model = Matrices(jax.random.normal(jax.random.key(1), (2, 5, 3)))
    x = jax.random.normal(jax.random.key(0), (8, 40, 3))
    sizes = jnp.array([[40, 0], [3, 30], [0, 0], [20, 20], [0, 40], [39, 1], [1, 1], [13, 17]])

    def loss(implementation, model, x, sizes):
        loss_of_rows = lambda x, sizes: (implementation(x, model.weight, sizes) ** 2).sum()
        return sum(loss_of_rows(*each) for each in zip(x, sizes, strict=True)), jnp.float32(1)

    found = zoo.value_and_grad(partial(loss, implementation), zoo.make_mesh(data=8))(model, x, sizes)
    expected = jax.value_and_grad(lambda model: loss(grouped_matmul_reference, model, x, sizes)[0] / 8)(model)
    assert jnp.allclose(found[0], expected[0], rtol=1e-6)
    assert jnp.allclose(found[1].weight, expected[1].weight, rtol=1e-5)


def measure_temporaries(topology, name):
    """Compile the gradient of a product of 512 rows of 128 by 4 matrices of 256 x 128; return its temporaries."""

    def loss(x, weight, sizes):
        with grouped_matmul.grouped_matmul_implementation(name):
            return grouped_matmul.grouped_matmul(x, weight, sizes).astype(jnp.float32).sum()

    shapes = [((512, 128), "bfloat16"), ((4, 256, 128), "bfloat16"), ((4,), "int32")]
    gradient = jax.grad(loss, argnums=(0, 1))
    program = compile_for(topology, gradient, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert program.memory is not None and not program.collectives
    return program.memory.temporaries


@pytest.mark.aot
def test_ragged_product_compiles_for_tpu_without_copies():
    assert measure_temporaries("v5e:2x4", "auto") < 512 * 256 * 2  # no bucket


@pytest.mark.aot
def test_grouped_products_compile_for_gpu():
    """XLA has no ragged kernel there without cuDNN: it multiplies every row by every matrix."""
    auto, ragged = (measure_temporaries("h100:8", name) for name in ("auto", "ragged"))
    assert 2 * auto < ragged >= 4 * 512 * 256 * 4
