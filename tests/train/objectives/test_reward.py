"""The pairwise loss of reward models is the formula, in float32, for large differences too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.train.objectives import pairwise_reward

CHOSEN = np.array([1.5, -0.25, 0.0, 3.0], np.float32)
REJECTED = np.array([0.5, 0.75, 0.0, -1.0], np.float32)


@pytest.mark.parametrize("margin", [0.0, 0.3, np.array([0.0, 1.0, 2.0, 3.0], np.float32)])
@pytest.mark.parametrize("center", [0.0, 0.01])
def test_the_loss_is_the_formula(margin, center):
    losses = pairwise_reward(jnp.asarray(CHOSEN), jnp.asarray(REJECTED), margin=jnp.asarray(margin), center=center)
    expected = np.log1p(np.exp(-(CHOSEN - REJECTED - margin))) + center * (CHOSEN + REJECTED) ** 2
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_gradients_are_finite_and_halves_use_float32():
    far = jnp.array([300.0, -300.0], jnp.bfloat16)
    losses, gradient = jax.value_and_grad(lambda x: pairwise_reward(x, -x).sum())(far)
    assert losses == 600 and gradient.tolist() == [0, -2]
    near = jnp.array([0.01], jnp.bfloat16)
    loss = pairwise_reward(near, jnp.zeros(1, jnp.bfloat16))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, np.log1p(np.exp(-np.asarray(near, np.float32))), rtol=1e-6)
