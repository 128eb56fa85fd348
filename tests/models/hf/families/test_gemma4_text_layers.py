"""A mixture beside an MLP equals its formula as a loop over experts, also sharded."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import GatedMLP, RMSNorm
from zoo.models import count_active_parameters
from zoo.models.hf.families.gemma4_text_layers import MixtureBesideMLP, ScaledSoftmaxRouter

EMBED, EXPERTS, TOP = 8, 4, 2


def make(key):
    router = partial(ScaledSoftmaxRouter, EMBED, EXPERTS, TOP)
    dense, expert, norm = partial(GatedMLP, EMBED, 10), partial(GatedMLP, EMBED, 6), partial(RMSNorm, EMBED)
    return MixtureBesideMLP(dense, router, expert, EXPERTS, norm, key=key)


def compute_formula(layer, x):
    """Every expert of every token, times 0 where it was not chosen."""
    scores = jax.nn.softmax(layer.router_norm(x) / EMBED**0.5 @ layer.router.scores.weight.T, axis=-1)
    kept = jnp.where(scores >= jnp.sort(scores, axis=-1)[..., -TOP, None], scores, 0)
    weights = kept / kept.sum(-1, keepdims=True) * layer.router.expert_scale
    outputs = eqx.filter_vmap(lambda expert: expert(layer.experts_norm(x))[0])(layer.experts)
    mixed = jnp.einsum("bse,ebsd->bsd", weights, outputs)
    return layer.dense_post_norm(layer.dense(layer.dense_norm(x))[0]) + layer.experts_post_norm(mixed)


@pytest.mark.slow
def test_mixture_beside_mlp_equals_formula_on_meshes():
    layer, x = randomize(make), activations(4, 5, EMBED)
    run = lambda layer, x: layer(x)[0]
    ours, expected = eqx.filter_jit(lambda layer, x: (run(layer, x), compute_formula(layer, x)))(layer, x)
    assert relative_error(ours, expected) < 1e-5
    mesh = zoo.make_mesh(1, expert=2, tensor=2, devices=jax.devices()[:4])
    sharded = zoo.spmd(run, mesh, out="batch seq embed")(zoo.place(layer, mesh), x)
    assert relative_error(sharded, expected) < 1e-5


def test_active_parameters_count_the_chosen_experts():
    layer = make(jax.random.key(0))
    assert zoo.count(layer) - count_active_parameters(layer) == (EXPERTS - TOP) * 3 * EMBED * 6
