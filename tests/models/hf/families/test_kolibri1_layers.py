"""The router of Kolibri chooses by logit + bias and weighs by the sigmoid alone."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.models.hf.families.kolibri1_layers import LogitBiasedRouter


@pytest.mark.parametrize("renormalize", [False, True])
def test_router_equals_a_loop_over_tokens(renormalize):
    router = LogitBiasedRouter(8, 5, 2, renormalize=renormalize, key=jax.random.key(0))
    random = np.random.default_rng(0)
    logits = random.standard_normal((2, 7, 5)).astype(np.float32)
    bias = 3 * random.standard_normal(5).astype(np.float32)
    router = eqx.tree_at(lambda node: node.selection_bias, router, jnp.asarray(bias))
    weights, chosen = router.choose(jnp.asarray(logits))
    for row, column in np.ndindex(2, 7):
        token = logits[row, column]
        best = np.argsort(-(token + bias))[:2]
        expected = 1 / (1 + np.exp(-token[best]))
        if renormalize:
            expected = expected / expected.sum()
        assert list(chosen[row, column]) == list(best)
        np.testing.assert_allclose(weights[row, column], expected, rtol=1e-6)
    first = jax.grad(lambda logits: router.choose(logits)[0][..., 0].sum())(jnp.asarray(logits))
    is_chosen = np.zeros(logits.shape, bool)
    np.put_along_axis(is_chosen, np.asarray(chosen if renormalize else chosen[..., :1]), True, -1)
    np.testing.assert_array_equal(first != 0, is_chosen, "only the chosen logits have a gradient")


def test_router_refuses_more_choices_than_experts():
    with pytest.raises(ValueError, match="at least 1 and at most all of 5 experts, not 6"):
        LogitBiasedRouter(8, 5, 6, key=jax.random.key(0))
