"""Rank allocation of AdaLoRA: importance scores, and masking all but the top ranks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters
from zoo.adapters.methods.adalora import find_adalora
from zoo.adapters.methods.rank_allocation import keep_top_ranks, rank_importance

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def model():
    """AdaLoRAs of the output projections of both layers, and of the second layer's query."""
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, key=KEY)
    return perturb(adapters.adalora(model, targets=("layers.1.attention.query", "out"), rank=3, key=KEY), scale=0.3)


def test_keep_top_ranks_keeps_the_highest_scores(model):
    """9 ranks in two stacked adapters. The first layer's query has none, and uses none of the budget."""
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size + 1), x.shape), zoo.trainable(model))
    scores = rank_importance(model, gradients)
    query, gradient = (tree.stack.segments[0].blocks[0].mixer.query for tree in (model, gradients))
    expected = np.abs(query.values[1] * gradient.values[1]) + np.abs(
        query.down.weight[1] * gradient.down.weight[1]
    ).mean(1)
    expected += np.abs(query.up.weight[1] * gradient.up.weight[1]).mean(0)
    np.testing.assert_allclose(scores[0][1], expected, rtol=1e-5)
    assert (np.asarray(scores[0][0]) == -1).all()

    run = eqx.filter_jit(keep_top_ranks)
    flat = np.sort(np.concatenate([np.asarray(x).reshape(-1) for x in scores]))[::-1]
    for budget in (0, 4, 9):
        masked = run(model, scores, jnp.array(budget))
        for score, (_, before), (_, after) in zip(scores, find_adalora(model), find_adalora(masked), strict=True):
            is_kept = np.asarray(score) >= (flat[budget - 1] if budget else np.inf)
            np.testing.assert_array_equal(after.values, np.where(is_kept, before.values, 0))
    with pytest.raises(ValueError, match="do not fit the model's 2 matrices with an AdaLoRA"):
        keep_top_ranks(model, scores[:1], 4)
