"""MesaNet: steps of decoded tokens, and the regularization at initialization."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.layers.random_layers import activations
from zoo.layers import MesaNet, TokenInfo


def test_a_decoded_token_takes_its_own_number_of_steps():
    x = activations(2, 5, 12)
    positions = jnp.broadcast_to(jnp.arange(5), (2, 5))

    @jax.jit
    def decode():
        outputs = []
        for options in ({}, {"decode_steps": 1}, {"steps": 1}, {"steps": 1, "decode_steps": 30}):
            layer = MesaNet(12, 2, **options, key=jax.random.key(0))
            _, state = layer(x[:, :4], TokenInfo(positions[:, :4]), layer.init_state(2, 5))
            outputs.append(layer(x[:, 4:], TokenInfo(positions[:, 4:]), state)[0])
        return outputs

    converged, one_step, also_one_step, also_converged = decode()
    np.testing.assert_array_equal(one_step, also_one_step)
    np.testing.assert_array_equal(converged, also_converged)
    assert np.abs(one_step - converged).max() > 1e-3 * np.abs(converged).max()


def test_regularization_starts_at_one():
    raw = MesaNet(12, 2, key=jax.random.key(0)).regularization
    assert raw.shape == (12,)
    np.testing.assert_allclose(0.25 + jax.nn.softplus(raw), 1, rtol=1e-6)
