"""Cross-entropy against its formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.ops.cross_entropy import cross_entropy


@pytest.mark.one_case
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("tokens", [(), pytest.param((5,), marks=pytest.mark.slow), (2, 3)])
def test_cross_entropy_equals_its_formula(tokens, z_loss):
    random = np.random.default_rng(0)
    logits = random.normal(0, 4, (*tokens, 11)).astype(np.float32)
    targets = random.integers(0, 11, tokens)
    log_z = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    chosen = np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    loss = cross_entropy(jnp.array(logits), jnp.array(targets), z_loss=z_loss)
    np.testing.assert_allclose(loss, log_z - chosen + z_loss * log_z**2, rtol=1e-6, atol=1e-6)


def test_cross_entropy_of_uniform_logits_is_log_vocab():
    loss = cross_entropy(jnp.zeros((3, 8)), jnp.array([0, 3, 7]))
    np.testing.assert_allclose(loss, 3 * np.log(2), rtol=1e-6)


def test_cross_entropy_of_large_bfloat16_logits_is_float32():
    logits = jnp.array([[2e4, 0.0, -2e4]], jnp.bfloat16)
    loss, gradient = jax.value_and_grad(lambda x: cross_entropy(x, jnp.array([1])).sum())(logits)
    assert loss.dtype == jnp.float32
    assert loss == logits[0, 0].astype(jnp.float32)
    np.testing.assert_array_equal(gradient.astype(jnp.float32), [[1, -1, 0]])
