"""Norms against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick import mark_slow
from zoo.ops.normalization import layer_norm, max_last_dim, rms_norm, sum_last_dim
from zoo.ops.platform import target_platform

EPSILON = 1e-3  # large, so that its place in the formula shows


def values(*shape, seed=0):
    return np.random.default_rng(seed).normal(2.0, 3.0, shape).astype(np.float32)


def formula(x, weight=1.0, bias=0.0, *, center):
    x = x.astype(np.float64)
    x = x - x.mean(-1, keepdims=True) if center else x
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight + bias


@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 4, 16)])
def test_norms_equal_their_formulas(shape):
    x, weight, bias = values(*shape), values(16, seed=1), values(16, seed=2)
    close = lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-5)
    x_, weight_, bias_ = (jnp.array(a) for a in (x, weight, bias))
    close(rms_norm(x_, epsilon=EPSILON), formula(x, center=False))
    close(rms_norm(x_, weight_, epsilon=EPSILON), formula(x, weight, center=False))
    close(rms_norm(x_, weight_, epsilon=EPSILON, offset=1.0), formula(x, 1 + weight, center=False))
    close(layer_norm(x_, epsilon=EPSILON), formula(x, center=True))
    close(layer_norm(x_, weight_, epsilon=EPSILON), formula(x, weight, center=True))
    close(layer_norm(x_, weight_, bias_, epsilon=EPSILON), formula(x, weight, bias, center=True))
    close(layer_norm(x_, None, bias_, epsilon=EPSILON), formula(x, 1.0, bias, center=True))


def test_rms_norm_with_one_weight_per_head():
    x, weight = values(2, 3, 4, 16), values(4, 16, seed=1)
    y = rms_norm(jnp.array(x), jnp.array(weight), epsilon=EPSILON)
    np.testing.assert_allclose(y, formula(x, weight, center=False), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_norms_of_bfloat16_compute_in_float32(norm):
    x = jnp.array(values(3, 16)).astype(jnp.bfloat16)
    weight = jnp.array(values(16, seed=1)).astype(jnp.bfloat16)
    y = norm(x, weight, epsilon=EPSILON)
    assert y.dtype == jnp.bfloat16
    single = norm(x.astype(jnp.float32), weight.astype(jnp.float32), epsilon=EPSILON)
    np.testing.assert_array_equal(y, single.astype(jnp.bfloat16))


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_norms_of_a_large_constant_are_finite(norm):
    x = jnp.full((1, 16), 3e4, jnp.bfloat16)
    y, gradient = jax.value_and_grad(lambda x: norm(x, epsilon=1e-6).astype(jnp.float32).sum())(x)
    assert np.isfinite(y) and np.isfinite(np.asarray(gradient, np.float32)).all()
    assert y == (16 if norm is rms_norm else 0)


@pytest.mark.parametrize("size", mark_slow([1, 32, 33, 77, 256, 1001], but=[1, 77, 256]))
def test_max_last_dim_equals_max(size):
    x = jax.random.normal(jax.random.key(size), (3, 5, size)).at[0, 0].set(-jnp.inf).at[1, 1, size // 2].set(jnp.nan)
    np.testing.assert_array_equal(max_last_dim(x), np.max(np.asarray(x), axis=-1, keepdims=True))


def test_max_last_dim_compares_halves_on_cpus_alone():
    count = lambda: str(jax.make_jaxpr(lambda x: max_last_dim(x))(jnp.zeros((2, 4096)))).count(" max ")
    with target_platform("tpu"):
        assert count() == 0
    assert count() == 3


@pytest.mark.parametrize("size", [1, 33, 48, 77, 512])
def test_sum_last_dim_equals_sum(size):
    """Halves of an odd size would count the middle twice."""
    x = jax.random.normal(jax.random.key(size), (3, 5, size))
    np.testing.assert_allclose(sum_last_dim(x), np.asarray(x).sum(-1, keepdims=True), atol=1e-5)
