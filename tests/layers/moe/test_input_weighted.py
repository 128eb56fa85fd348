"""A mixture that weighs the inputs of experts equals a loop over experts, also sharded."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import GatedMLP, InputWeightedMixture, TopSigmoidRouter

EMBED, EXPERTS, TOP = 8, 4, 2


def make(key):
    expert = partial(GatedMLP, EMBED, 6)
    return InputWeightedMixture(partial(TopSigmoidRouter, EMBED, EXPERTS, TOP), expert, EXPERTS, shared=expert, key=key)


def compute_formula(layer, x):
    """S(x) + the sum over experts of E(w x), where w is 0 for experts that were not chosen."""
    logits = x @ layer.router.scores.weight.T
    threshold = jnp.sort(logits, axis=-1)[..., -TOP, None]
    weights = jnp.where(logits >= threshold, jax.nn.sigmoid(logits), 0)
    y = layer.shared(x)[0]
    for number in range(EXPERTS):
        expert = jax.tree.map(lambda array, number=number: array[number], eqx.filter(layer.experts, eqx.is_array))
        expert = eqx.combine(expert, eqx.filter(layer.experts, eqx.is_array, inverse=True))
        y = y + expert(x * weights[..., number, None])[0]
    return y


@pytest.mark.slow
def test_input_weighted_mixture_equals_loop_on_meshes():
    layer, x = randomize(make), activations(4, 5, EMBED)
    run = lambda layer, x: layer(x)[0]
    ours, expected = eqx.filter_jit(lambda layer, x: (run(layer, x), compute_formula(layer, x)))(layer, x)
    assert relative_error(ours, expected) < 1e-5
    mesh = zoo.make_mesh(1, expert=2, tensor=2, devices=jax.devices()[:4])
    sharded = zoo.spmd(run, mesh, out="batch seq embed")(zoo.place(layer, mesh), x)
    assert relative_error(sharded, expected) < 1e-5
