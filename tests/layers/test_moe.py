"""A mixture is the loop over tokens and their experts, whatever the router says and wherever it runs."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zoo
from zoo.layers import (
    MLP,
    BiasedRouter,
    ClampedGatedMLP,
    GatedMLP,
    Linear,
    MixtureOfExperts,
    SoftmaxRouter,
    TopSoftmaxRouter,
)
from zoo.parallel import Dim

KEY = jax.random.key(0)
EMBED, WIDTH, EXPERTS, BATCH, SEQ = 8, 6, 4, 3, 5
ROUTERS = {
    "softmax": partial(SoftmaxRouter, renormalize=False, scale=1.5),
    "renormalized": SoftmaxRouter,
    "best of groups": partial(SoftmaxRouter, groups=2, kept_groups=1),
    "top, then softmax": partial(TopSoftmaxRouter, bias=True),
    "sigmoid": BiasedRouter,
    "softmax and a bias, in groups": partial(BiasedRouter, score="softmax", groups=2, kept_groups=1, renormalize=False),
}


def mixture(router=SoftmaxRouter, *, experts=EXPERTS, top=2, expert=None, bias=False, key=KEY, **options):
    """With what starts at zero moved away from it."""
    expert = partial(GatedMLP, EMBED, WIDTH, bias=bias) if expert is None else expert
    made = MixtureOfExperts(partial(router, EMBED, experts, top), expert, experts, key=key, **options)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(KEY, x.shape), made)


def by_hand(layer, x):
    """One token after another, each through its experts one after another."""
    weights, routing = (np.asarray(a) for a in (layer.router(x)[0], layer.router(x)[1].chosen))
    expert = lambda number: jax.tree.map(lambda leaf: leaf[number], layer.experts)
    every = np.stack([expert(number)(x)[0] for number in range(len(layer.experts.up.weight))]).astype(np.float64)
    out = np.zeros(x.shape)
    for b, s in np.ndindex(x.shape[:2]):
        for weight, number in zip(weights[b, s], routing[b, s], strict=True):
            out[b, s] += weight * every[number, b, s]
    return out


tokens = jax.random.normal(jax.random.key(7), (BATCH, SEQ, EMBED))


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_it_is_the_weighted_sum_of_the_chosen_experts(router):
    layer = mixture(router, bias=True)
    np.testing.assert_allclose(layer(tokens)[0], by_hand(layer, tokens), atol=1e-5)


@pytest.mark.parametrize("top, experts", [(1, 1), (4, 4), (1, 4)])
def test_one_expert_and_all_of_them(top, experts):
    layer = mixture(top=top, experts=experts)
    np.testing.assert_allclose(layer(tokens)[0], by_hand(layer, tokens), atol=1e-5)


@given(favorites=st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=2, unique=True), tie=st.booleans())
def test_all_tokens_to_few_experts_and_ties(favorites, tie):
    """Equal scores go to the lower numbers; experts that get no token get no gradient and no NaN."""
    bias = jnp.zeros(EXPERTS).at[jnp.array(favorites)].set(0.0 if tie else 50.0)
    layer = mixture(partial(TopSoftmaxRouter, bias=True), top=len(favorites))
    layer = eqx.tree_at(lambda m: (m.router.scores.weight, m.router.scores.bias), layer, (jnp.zeros((4, EMBED)), bias))
    grads, routing = gradient(layer)
    used = sorted(range(len(favorites)) if tie else favorites)
    assert np.unique(routing.chosen).tolist() == used
    for leaf in jax.tree.leaves(grads.experts):
        moved = np.abs(leaf).reshape(EXPERTS, -1).max(1) > 0
        assert np.flatnonzero(moved).tolist() == used and np.isfinite(leaf).all()


@eqx.filter_jit
def gradient(layer):
    def loss(layer):
        y, (routing,) = layer(tokens)
        return (y**2).sum(), routing

    return eqx.filter_grad(loss, has_aux=True)(layer)


def test_shared_experts_see_every_token():
    shared, gate = partial(GatedMLP, EMBED, 2 * WIDTH), partial(Linear, EMBED, 1, in_=Dim("embed"), out=Dim("choices"))
    layer = mixture(shared=shared, shared_gate=gate)
    alone = layer.shared(tokens)[0] * jax.nn.sigmoid(layer.shared_gate(tokens))
    np.testing.assert_allclose(layer(tokens)[0], by_hand(layer, tokens) + alone, atol=1e-5)


@pytest.mark.parametrize("kind", [MLP, partial(ClampedGatedMLP, limit=0.5)], ids=["plain", "clamped"])
def test_any_feed_forward_layer_is_an_expert(kind):
    layer = mixture(expert=partial(kind, EMBED, WIDTH))
    np.testing.assert_allclose(layer(tokens)[0], by_hand(layer, tokens), atol=1e-5)


@pytest.mark.parametrize("router", [SoftmaxRouter, partial(TopSoftmaxRouter, bias=True)], ids=["softmax", "biased"])
def test_a_capacity_that_is_large_enough_drops_nothing(router):
    layer = mixture(router, bias=True)
    wide = mixture(router, bias=True, capacity_factor=EXPERTS / 2)
    grads, grads_wide = gradient(layer)[0], gradient(wide)[0]
    np.testing.assert_allclose(wide(tokens)[0], layer(tokens)[0], atol=1e-5)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_wide), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-4)


def test_beyond_its_capacity_an_expert_adds_nothing():
    """Of a row's five tokens, which all want the same two experts, each takes ceil(0.5 * 2 * 5 / 4) = 2: the first."""
    layer = mixture(partial(TopSoftmaxRouter, bias=True), capacity_factor=0.5)
    bias = jnp.array([9.0, 8.0, 0.0, 0.0])
    layer = eqx.tree_at(lambda m: (m.router.scores.weight, m.router.scores.bias), layer, (jnp.zeros((4, EMBED)), bias))
    assert (layer(tokens)[0][:, 2:] == 0).all()
    np.testing.assert_allclose(layer(tokens)[0][:, :2], by_hand(layer, tokens)[:, :2], atol=1e-5)


def test_scores_are_float32_whatever_the_rest_is():
    layer = zoo.cast(mixture(), jnp.bfloat16)
    assert layer.router.scores.weight.dtype == jnp.float32 and layer.experts.up.weight.dtype == jnp.bfloat16
    weights, routing = layer.router(tokens.astype(jnp.bfloat16))
    assert weights.dtype == routing.logits.dtype == jnp.float32
    assert layer(tokens.astype(jnp.bfloat16))[0].dtype == jnp.bfloat16


def test_the_same_bits_at_every_run():
    layer = mixture()
    first, second = (gradient(layer)[0] for _ in range(2))
    assert eqx.tree_equal(first, second)


def test_a_selection_bias_is_not_learnt():
    layer = mixture(BiasedRouter)
    assert zoo.trainable(layer).router.selection_bias is None
    assert zoo.trainable(layer).router.scores.weight is not None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top": 5}, "at most all of 4 experts, not 5"),
        ({"top": 0}, "at least 1"),
        ({"router": partial(SoftmaxRouter, groups=3)}, "4 experts do not share out over 3 groups"),
        ({"router": partial(SoftmaxRouter, groups=4)}, "1 of 4 groups hold 1 experts, and a token goes to 2"),
        ({"capacity_factor": 0.0}, "above 0"),
        ({"shared_gate": partial(Linear, EMBED, 1)}, "there is none"),
    ],
)
def test_what_does_not_go_together_raises(options, message):
    with pytest.raises(ValueError, match=message):
        mixture(**options)


def test_an_expert_that_takes_no_groups_says_so():
    class Odd(zoo.layers.AbstractFeedForward):
        def __call__(self, x):
            return x, ()

    with pytest.raises(NotImplementedError, match="a Odd takes no groups of rows"):
        mixture(expert=lambda key: Odd())(tokens)
