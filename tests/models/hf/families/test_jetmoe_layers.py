"""A mixture of attention heads equals attention of each expert alone, weighted and summed, also sharded."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import Attention, TokenInfo, TopSoftmaxRouter
from zoo.models import count_active_parameters
from zoo.models.hf.families.jetmoe_layers import MixtureOfAttention
from zoo.ops.rotary import Rotary

EMBED, HEADS, HEAD_DIM, EXPERTS, TOP = 8, 4, 2, 3, 2


def make(key):
    router, rotary = partial(TopSoftmaxRouter, EMBED, EXPERTS, TOP), Rotary(HEAD_DIM)
    options = {"experts": EXPERTS, "head_dim": HEAD_DIM, "rotary": rotary}
    return MixtureOfAttention(EMBED, HEADS, router=router, **options, key=key)


def compute_formula(layer, x, info):
    """The sum over experts of w A(x) + b, where A has the expert's projections, and w is 0 if it was not chosen."""
    logits = x @ layer.router.scores.weight.T
    threshold = jnp.sort(logits, axis=-1)[..., -TOP, None]
    weights = jax.nn.softmax(jnp.where(logits >= threshold, logits, -jnp.inf))
    attention = Attention(EMBED, HEADS, head_dim=HEAD_DIM, rotary=layer.rotary, key=jax.random.key(0))
    y = layer.bias
    for number in range(EXPERTS):
        query, out = (projection.weight[number] for projection in (layer.experts.query, layer.experts.out))
        parts = lambda a: (a.query.weight, a.key.weight, a.value.weight, a.out.weight)
        expert = eqx.tree_at(parts, attention, (query, layer.key.weight, layer.value.weight, out))
        y = y + weights[..., number, None] * expert(x, info)[0]
    return y


@pytest.mark.slow
def test_mixture_of_attention_equals_loop_on_meshes():
    layer, x, weights = randomize(make), activations(2, 6, EMBED), activations(2, 6, EMBED, seed=2)
    segment_ids = jnp.asarray([[1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1]])
    run = lambda layer, x, segment_ids: layer(x, TokenInfo(segment_ids=segment_ids))[0]
    run_formula = lambda layer, x, segment_ids: compute_formula(layer, x, TokenInfo(segment_ids=segment_ids))

    @eqx.filter_jit
    def differentiate(layer):
        losses = [lambda layer, run=run: (run(layer, x, segment_ids) * weights).sum() for run in (run, run_formula)]
        return [eqx.filter_grad(loss)(layer) for loss in losses], run_formula(layer, x, segment_ids)

    (gradient, wanted), expected = differentiate(layer)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        assert relative_error(ours, theirs) < 1e-5
    mesh = zoo.make_mesh(1, expert=2, context=2, tensor=2)
    sharded = zoo.spmd(run, mesh, out="batch seq embed")(zoo.place(layer, mesh), x, segment_ids)
    assert relative_error(sharded, expected) < 1e-5


def test_active_parameters_are_those_of_chosen_experts():
    layer = eqx.filter_eval_shape(make, jax.random.key(0))
    assert zoo.count(layer) - count_active_parameters(layer) == (EXPERTS - TOP) * 2 * EMBED * HEADS * HEAD_DIM
