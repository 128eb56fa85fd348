"""Products of linear layers in low precision against a float64 model of each recipe."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.aot import compile_for
from tests.ops.quantized import float64_recipes as reference
from zoo.ops.platform import target_platform
from zoo.ops.quantized.blocks import BlockScaling
from zoo.ops.quantized.fp8 import E4M3
from zoo.ops.quantized.mxfp8 import MXFP8
from zoo.ops.quantized.per_tensor import CurrentScaling, DelayedScaling
from zoo.ops.quantized.scaled_matmul import AmaxArrays, scaled_matmul

RANDOM = np.random.default_rng(0)
X = np.float32(RANDOM.normal(size=(2, 32, 40)) * np.exp2(RANDOM.uniform(-6, 3, (2, 32, 40))))
WEIGHT = np.float32(RANDOM.normal(size=(56, 40)) * 0.1)
GRADIENT = np.float32(RANDOM.normal(size=(2, 32, 56)) * np.exp2(RANDOM.uniform(-20, 0, (2, 32, 56))))

E4M3_TENSOR, E5M2_TENSOR = (partial(reference.per_tensor, dtype=d) for d in (reference.E4M3, reference.E5M2))
TILE = partial(reference.tiles, rows=1, columns=8, quantize=E4M3_TENSOR)
BLOCK = partial(reference.tiles, rows=8, columns=8, quantize=E4M3_TENSOR)
POWER_TILE = partial(reference.tiles, rows=1, columns=8, quantize=reference.power_of_two_tile)
POWER_BLOCK = partial(reference.tiles, rows=8, columns=8, quantize=reference.power_of_two_tile)
MX_TILE = partial(reference.tiles, rows=1, columns=32, quantize=reference.mx_tile)
RECIPES = {
    "current": (CurrentScaling(), E4M3_TENSOR, E4M3_TENSOR, E5M2_TENSOR),
    "blocks": (BlockScaling(size=8), TILE, BLOCK, TILE),
    "blocks, power of two": (BlockScaling(size=8, power_of_two=True), POWER_TILE, POWER_BLOCK, POWER_TILE),
    "mxfp8": (MXFP8(), MX_TILE, MX_TILE, MX_TILE),
    "current, e4m3 gradients": (CurrentScaling(gradient_dtype=E4M3), E4M3_TENSOR, E4M3_TENSOR, E4M3_TENSOR),
}


@partial(jax.jit, static_argnums=(0, 1))
def run(recipe, dim, x, weight, gradient):
    y, pull_back = jax.vjp(lambda x, weight: scaled_matmul(x, weight, dim, recipe), x, weight)
    return y, *pull_back(gradient)


@pytest.mark.one_case
@pytest.mark.parametrize("name", RECIPES)
def test_products_match_the_float64_model(name):
    """Up to float32 sums: 2^-22 of the sum of magnitudes, over at most 56 terms."""
    recipe, *quantizers = RECIPES[name]
    rows = lambda z: z.reshape(-1, z.shape[-1])
    expected = reference.products(rows(X), WEIGHT, rows(GRADIENT), *quantizers)
    for dim, weight in ((1, WEIGHT), (0, WEIGHT.T)):
        actual = run(recipe, dim, X, weight, GRADIENT)
        for y, z in zip(actual, (*expected[:2], expected[2] if dim == 1 else expected[2].T), strict=True):
            y = np.asarray(y).reshape(z.shape)
            assert np.abs(y - z).max() <= 2e-6 * np.abs(z).max()


def test_results_have_the_dtypes_of_the_operands():
    x, weight = jnp.asarray(X, jnp.bfloat16), jnp.asarray(WEIGHT)
    y, x_gradient, weight_gradient = jax.eval_shape(partial(run, CurrentScaling(), 1), x, weight, GRADIENT)
    assert (y.dtype, x_gradient.dtype, weight_gradient.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)


@pytest.mark.aot
@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(history=4)])
def test_linear_is_three_fp8_products_on_h100(recipe):
    """The forward product and both gradients are matmuls of float8 operands: kernels of cublasLt, or of Triton, as XLA
    chooses without autotuning."""

    def step(x, weight, gradient, history):
        arrays = AmaxArrays(history, history, history) if recipe.history_length else None
        y, pull_back = jax.vjp(lambda x, weight: scaled_matmul(x, weight, 1, recipe, history=arrays), x, weight)
        return y, pull_back(gradient)

    shapes = [((2, 256, 512), "bfloat16"), ((1024, 512), "bfloat16"), ((2, 256, 1024), "bfloat16"), ((4,), "float32")]
    with target_platform("gpu"):
        text = compile_for("h100:8", step, *(jax.ShapeDtypeStruct(*shape) for shape in shapes)).text
    triton = re.findall(r"^%gemm_fusion\S* \(\S+ f8e\w+\[[^\]]*\], \S+ f8e", text, re.MULTILINE)
    cublas = re.findall(r'custom_call_target="__cublas\$lt\$matmul\$f8"', text)
    assert len(triton) + len(cublas) == 3
    assert len(re.findall(r" dot\(", text)) == len(triton)
