"""A mixture of experts of a latent equals its formula as a loop over experts, also sharded."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import MLP, BiasedRouter
from zoo.models import count_active_parameters
from zoo.models.hf.families.nemotron_h_layers import LatentMixture
from zoo.ops.activations import relu_squared

EMBED, LATENT, EXPERTS, TOP = 8, 4, 4, 2


def make(key, bias=True):
    router = partial(BiasedRouter, EMBED, EXPERTS, TOP, renormalize=True, scale=1.5, groups=1, kept_groups=1)
    expert = partial(MLP, LATENT, 6, activation=relu_squared, bias=False)
    shared = partial(MLP, EMBED, 10, activation=relu_squared, bias=bias)
    return LatentMixture(router, expert, EXPERTS, embed=EMBED, latent=LATENT, shared=shared, bias=bias, key=key)


def compute_formula(layer, x):
    """Every expert of every token, times 0 where it was not chosen."""
    scores = jax.nn.sigmoid(x @ layer.router.scores.weight.T)
    biased = scores + layer.router.selection_bias
    kept = jnp.where(biased >= jnp.sort(biased, axis=-1)[..., -TOP, None], scores, 0)
    weights = 1.5 * kept / kept.sum(-1, keepdims=True)
    outputs = eqx.filter_vmap(lambda expert: expert(layer.down(x))[0])(layer.experts)
    return layer.shared(x)[0] + layer.up(jnp.einsum("bse,ebsd->bsd", weights, outputs))


def test_latent_mixture_equals_formula_on_meshes():
    layer, x = randomize(make), activations(4, 5, EMBED)
    run = lambda layer, x: layer(x)[0]
    ours, expected = eqx.filter_jit(lambda layer, x: (run(layer, x), compute_formula(layer, x)))(layer, x)
    assert relative_error(ours, expected) < 1e-5
    mesh = zoo.make_mesh(1, expert=2, tensor=2, devices=jax.devices()[:4])
    sharded = zoo.spmd(run, mesh, out="batch seq embed")(zoo.place(layer, mesh), x)
    assert relative_error(sharded, expected) < 1e-5


def test_active_parameters_count_the_chosen_experts():
    layer = make(jax.random.key(0), bias=False)
    assert zoo.count(layer) - count_active_parameters(layer) == (EXPERTS - TOP) * 2 * LATENT * 6
