"""Checks that tests of several mixers share: a forward pass, decoding, and a mesh against one device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import zoo
from tests.layers.random_layers import activations, relative_error
from zoo.layers import TokenInfo
from zoo.parallel import gather


@eqx.filter_jit
def forward(layer, x, info=None):
    """Return the outputs of all tokens at once, without a state."""
    return layer(x, info or TokenInfo())[0]


@eqx.filter_jit
def decode(layer, state, x, positions):
    """Return the outputs of further tokens, and the updated state."""
    return layer(x, TokenInfo(positions), state)


def loss_fn(layer, batch):
    return (gather(layer)(batch["x"], TokenInfo())[0] * batch["weights"]).sum(), jnp.float32(batch["x"].size)


def prefill_and_decode(layer, x):
    """Prefill all but two tokens, then decode these one at a time."""
    layer, seq = gather(layer), x.shape[1]
    state, outputs = layer.init_state(x.shape[0], seq), []
    for start, stop in ((0, seq - 2), (seq - 2, seq - 1), (seq - 1, seq)):
        positions = jnp.broadcast_to(jnp.arange(start, stop), (x.shape[0], stop - start))
        y, state = layer(x[:, start:stop], TokenInfo(positions), state)
        outputs.append(y)
    return jnp.concatenate(outputs, 1)


def check_mesh_equals_one_device(layer, x, mesh):
    """Compare loss, gradients and decoding on a mesh with those on one device."""
    batch = {"x": x, "weights": activations(*x.shape, seed=2)}
    placed = zoo.place(layer, mesh)
    loss, grads = zoo.value_and_grad(loss_fn, mesh)(placed, batch)
    reference = eqx.filter_jit(eqx.filter_value_and_grad(lambda layer: loss_fn(layer, batch)[0] / x.size))
    expected_loss, expected_grads = reference(layer)
    terms = jnp.abs(forward(layer, x) * batch["weights"])  # of both signs, so that their sum is small but not its error
    assert abs(loss - expected_loss) < 2e-7 * terms.mean()
    for actual, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert np.abs(actual - expected).max() <= 3e-5 * max(np.abs(expected).max(), 1e-3)
    decoded = zoo.spmd(prefill_and_decode, mesh, out="batch seq embed")(placed, x)
    assert relative_error(decoded, forward(layer, x)) < 1e-5
