"""Interpolation, bicubic and linear: PyTorch's numbers, and what any interpolation keeps."""

import jax.numpy as jnp
import numpy as np
import pytest

from zoo.ops.resize import cubic_weights, linear_weights, resize_bicubic

VALUES = np.array([0.0, 1.0, 4.0, 9.0, -2.0])
PYTORCH = {
    7: [-0.078717201166, 0.265306122449, 1.68221574344, 4.0, 9.014577259475, 4.906705539359, -2.865889212828],
    3: [0.148148148148, 4.0, 1.740740740741],
    5: VALUES,
}
"""torch.nn.functional.interpolate(mode="bicubic", align_corners=False) in float64, torch 2.13."""


@pytest.mark.parametrize("size", PYTORCH)
def test_cubic_weights_interpolate_as_pytorch(size):
    weights = cubic_weights(len(VALUES), size)
    np.testing.assert_allclose(weights @ VALUES, PYTORCH[size], atol=1e-11)
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-12)


def test_resize_bicubic_interpolates_rows_and_columns():
    x = np.random.default_rng(0).normal(size=(4, 5, 3))
    resized = resize_bicubic(jnp.asarray(x, jnp.float32), (6, 2))
    wanted = np.einsum("yh,xw,hwf->yxf", cubic_weights(4, 6), cubic_weights(5, 2), x)
    np.testing.assert_allclose(resized, wanted, atol=1e-5)
    assert resize_bicubic(jnp.asarray(x, jnp.bfloat16), (6, 2)).dtype == jnp.bfloat16


LINEAR = {
    7: [0.0, 0.571428571429, 1.857142857143, 4.0, 7.571428571429, 4.285714285714, -2.0],
    5: VALUES,
    3: [0.428571428571, 4.444444444444, 2.714285714286],
    2: [1.727272727273, 4.0],
    1: [2.842105263158],
}
"""torch.nn.functional.interpolate(mode="bilinear", align_corners=False, antialias=True) in float64, torch 2.13."""


def test_linear_weights_interpolate_to_several_sizes_at_once():
    sizes = jnp.array([*LINEAR])
    index = jnp.broadcast_to(jnp.arange(7), (len(LINEAR), 7))
    weights = linear_weights(len(VALUES), sizes, index)
    for own, (size, wanted) in zip(weights, LINEAR.items(), strict=True):
        np.testing.assert_allclose(own[:size] @ VALUES, wanted, atol=1e-5)
        np.testing.assert_allclose(own[:size].sum(1), 1, atol=1e-6)
