"""Mixture of experts equals a loop over tokens and experts, for every router, with and without a capacity."""

import functools
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
    GatedMLP,
    Linear,
    MixtureOfExperts,
    SoftmaxRouter,
    TopSoftmaxRouter,
)
from zoo.layers.moe.routing import sum_routing
from zoo.models import tokens_per_expert
from zoo.models.hf.families.gpt_oss_layers import ClampedGatedMLP
from zoo.models.hf.families.phimoe_layers import SparseMixerRouter
from zoo.models.load_balancing import count_active_parameters
from zoo.parallel import Dim

KEY = jax.random.key(0)
EMBED, MLP_DIM, EXPERTS, BATCH, SEQ = 8, 6, 4, 3, 5
ROUTERS = {
    "softmax": partial(SoftmaxRouter, renormalize=False, scale=1.5),
    "renormalized": SoftmaxRouter,
    "best of groups": partial(SoftmaxRouter, groups=2, kept_groups=1),
    "top, then softmax": partial(TopSoftmaxRouter, bias=True),
    "sparse mixer": partial(SparseMixerRouter, jitter=0.5),
    "sigmoid": BiasedRouter,
    "square roots of softplus": partial(BiasedRouter, score="sqrt_softplus", scale=1.5),
    "softmax and a bias, in groups": partial(BiasedRouter, score="softmax", groups=2, kept_groups=1, renormalize=False),
}


def make_mixture(router=SoftmaxRouter, *, experts=EXPERTS, top=2, expert=None, bias=False, key=KEY, **options):
    """Return a mixture with noise added to every parameter, biases included."""
    expert = partial(GatedMLP, EMBED, MLP_DIM, bias=bias) if expert is None else expert
    choices = experts + options.get("identities", 0)
    layer = MixtureOfExperts(partial(router, EMBED, choices, top), expert, experts, key=key, **options)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(KEY, x.shape), layer)


def naive_mixture(layer, x):
    """Loop over tokens and their experts."""
    weights, routing = layer.router(x)
    weights, chosen = np.asarray(weights), np.asarray(routing.chosen)
    expert = lambda index: jax.tree.map(lambda leaf: leaf[index], layer.experts)
    outputs = [expert(index)(x)[0] for index in range(len(layer.experts.up.weight))]
    outputs = np.stack([*outputs, *[x] * layer.identities]).astype(np.float64)
    y = np.zeros(x.shape)
    for b, s in np.ndindex(x.shape[:2]):
        for weight, index in zip(weights[b, s], chosen[b, s], strict=True):
            y[b, s] += weight * outputs[index, b, s]
    return y


tokens = jax.random.normal(jax.random.key(7), (BATCH, SEQ, EMBED))


@pytest.mark.ci
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_mixture_equals_weighted_sum_of_chosen_experts(router):
    layer = make_mixture(router, bias=True)
    np.testing.assert_allclose(layer(tokens)[0], naive_mixture(layer, tokens), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("top, experts", [(1, 1), (4, 4), (1, 4)])
def test_mixture_of_one_expert_and_of_all(top, experts):
    layer = make_mixture(top=top, experts=experts)
    np.testing.assert_allclose(layer(tokens)[0], naive_mixture(layer, tokens), atol=1e-5)


@functools.cache
def make_biased_mixture(top):
    return make_mixture(partial(TopSoftmaxRouter, bias=True), top=top)


@given(favorites=st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=2, unique=True), tie=st.booleans())
def test_mixture_gradient_with_unused_experts_and_ties(favorites, tie):
    """Ties go to the lower index; experts without tokens get zero gradients, not NaN."""
    bias = jnp.zeros(EXPERTS).at[jnp.array(favorites)].set(0.0 if tie else 50.0)
    layer = make_biased_mixture(len(favorites))
    layer = eqx.tree_at(lambda m: (m.router.scores.weight, m.router.scores.bias), layer, (jnp.zeros((4, EMBED)), bias))
    grads, routing = gradient(layer)
    used = sorted(range(len(favorites)) if tie else favorites)
    assert np.unique(routing.chosen).tolist() == used
    for leaf in jax.tree.leaves(grads.experts):
        has_gradient = np.abs(leaf).reshape(EXPERTS, -1).max(1) > 0
        assert np.flatnonzero(has_gradient).tolist() == used and np.isfinite(leaf).all()


@eqx.filter_jit
def gradient(layer):
    def loss(layer):
        y, (routing,) = layer(tokens)
        return (y**2).sum(), routing

    return eqx.filter_grad(loss, has_aux=True)(layer)


def test_mixture_shared_expert_applies_to_every_token():
    shared, gate = (
        partial(GatedMLP, EMBED, 2 * MLP_DIM),
        partial(Linear, EMBED, 1, in_=Dim("embed"), out=Dim("choices")),
    )
    layer = make_mixture(shared=shared, shared_gate=gate)
    shared_y = layer.shared(tokens)[0] * jax.nn.sigmoid(layer.shared_gate(tokens))
    np.testing.assert_allclose(layer(tokens)[0], naive_mixture(layer, tokens) + shared_y, atol=1e-5)


@pytest.mark.parametrize("expert", [MLP, partial(ClampedGatedMLP, limit=0.5)], ids=["plain", "clamped"])
def test_mixture_accepts_any_feed_forward_as_expert(expert):
    layer = make_mixture(expert=partial(expert, EMBED, MLP_DIM))
    np.testing.assert_allclose(layer(tokens)[0], naive_mixture(layer, tokens), atol=1e-5)


@pytest.mark.slow  # docs/moe.md compares a roomy mixture with a dropless one
@pytest.mark.parametrize("router", [SoftmaxRouter, partial(TopSoftmaxRouter, bias=True)], ids=["softmax", "biased"])
def test_capacity_that_is_large_enough_drops_nothing(router):
    layer = make_mixture(router, bias=True)
    limited = make_mixture(router, bias=True, capacity_factor=EXPERTS / 2)
    grads, limited_grads = gradient(layer)[0], gradient(limited)[0]
    np.testing.assert_allclose(limited(tokens)[0], layer(tokens)[0], atol=1e-5)
    for expected, actual in zip(jax.tree.leaves(grads), jax.tree.leaves(limited_grads), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_capacity_drops_tokens_beyond_it():
    """All five tokens of a row choose the same two experts, whose capacity is ceil(0.5 * 2 * 5 / 4) = 2 tokens."""
    layer = make_mixture(partial(TopSoftmaxRouter, bias=True), capacity_factor=0.5)
    bias = jnp.array([9.0, 8.0, 0.0, 0.0])
    layer = eqx.tree_at(lambda m: (m.router.scores.weight, m.router.scores.bias), layer, (jnp.zeros((4, EMBED)), bias))
    assert (layer(tokens)[0][:, 2:] == 0).all()
    np.testing.assert_allclose(layer(tokens)[0][:, :2], naive_mixture(layer, tokens)[:, :2], atol=1e-5)


def test_router_logits_are_float32_in_bfloat16_models():
    layer = zoo.cast(make_mixture(), jnp.bfloat16)
    assert layer.router.scores.weight.dtype == jnp.float32 and layer.experts.up.weight.dtype == jnp.bfloat16
    weights, routing = layer.router(tokens.astype(jnp.bfloat16))
    assert weights.dtype == routing.logits.dtype == jnp.float32
    assert layer(tokens.astype(jnp.bfloat16))[0].dtype == jnp.bfloat16


def test_mixture_gradient_is_deterministic():
    layer = make_mixture(partial(TopSoftmaxRouter, bias=True), bias=True)  # a program of the tests above
    first, second = (gradient(layer)[0] for _ in range(2))
    assert eqx.tree_equal(first, second)


def test_selection_bias_is_not_trainable():
    layer = make_mixture(BiasedRouter)
    assert zoo.trainable(layer).router.selection_bias is None
    assert zoo.trainable(layer).router.scores.weight is not None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top": 5}, "at most all of 4 experts, not 5"),
        ({"top": 0}, "at least 1"),
        ({"router": partial(SoftmaxRouter, groups=3)}, "4 experts do not divide evenly over 3 groups"),
        ({"router": partial(SoftmaxRouter, groups=4)}, "1 of 4 groups hold 1 experts, and a token goes to 2"),
        ({"capacity_factor": 0.0}, "above 0"),
        ({"shared_gate": partial(Linear, EMBED, 1)}, "there is none"),
    ],
)
def test_mixture_rejects_inconsistent_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_mixture(**options)


def test_mixture_rejects_experts_without_grouped():
    class Odd(zoo.layers.AbstractFeedForward):
        def __call__(self, x):
            return x, ()

    with pytest.raises(NotImplementedError, match="^Odd takes no groups of rows"):
        make_mixture(expert=lambda key: Odd())(tokens)


def test_biased_router_bounds_its_logits_by_a_soft_cap():
    """In the logits that it returns, too, as a load-balancing loss reads them."""
    make = lambda **options: BiasedRouter(EMBED, EXPERTS, 2, **options, key=KEY)
    (weights, plain), (capped_weights, capped) = make()(tokens), make(soft_cap=0.5)(tokens)
    np.testing.assert_allclose(capped.logits, 0.5 * np.tanh(np.asarray(plain.logits) / 0.5), rtol=1e-6)
    np.testing.assert_array_equal(capped.chosen, plain.chosen)
    assert np.abs(weights - capped_weights).max() > 0.01


UNBIASED_SOFTMAX = partial(BiasedRouter, score="softmax", renormalize=False, scale=1.5)


@pytest.mark.parametrize("router", [SoftmaxRouter, UNBIASED_SOFTMAX], ids=["softmax", "biased"])
@pytest.mark.parametrize("top", [1, 3])
def test_experts_without_computation_return_their_input(router, top):
    """With their weight, and whatever else a token chose; a capacity with room for all tokens changes nothing."""
    layer = make_mixture(router, identities=3, top=top)
    y, (routing,) = layer(tokens)
    assert {*np.unique(routing.chosen >= EXPERTS)} == {False, True} and routing.logits.shape[-1] == EXPERTS + 3
    np.testing.assert_allclose(y, naive_mixture(layer, tokens), atol=1e-5)
    roomy = make_mixture(router, identities=3, top=top, capacity_factor=7)
    np.testing.assert_allclose(roomy(tokens)[0], y, atol=1e-5)
    grads, routing = gradient(layer)
    assert_equal_gradients(grads, gradient(roomy)[0])
    assert_equal_gradients(grads, eqx.filter_grad(dense_loss)(layer, routing.chosen))


def assert_equal_gradients(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def dense_loss(layer, chosen):
    """The loss of `gradient`, from every expert of every token, most with the weight 0."""
    weights, _ = layer.router(tokens)
    by_choice = (weights[..., None] * (chosen[..., None] == jnp.arange(EXPERTS + 3))).sum(2)
    outputs = eqx.filter_vmap(lambda expert: expert(tokens)[0])(layer.experts)
    y = jnp.einsum("bse,ebsd->bsd", by_choice[..., :EXPERTS], outputs)
    return ((y + by_choice[..., EXPERTS:].sum(-1, keepdims=True) * tokens) ** 2).sum()


@pytest.mark.one_case
def test_experts_without_computation_take_no_capacity():
    """All tokens of a row choose experts 0 and 4, which returns its input, and expert 0 has room for
    ceil(0.5 * 2 * 5 / 5) = 1 of them."""
    layer = make_mixture(partial(TopSoftmaxRouter, bias=True), identities=1, capacity_factor=0.5)
    bias = jnp.array([8.0, 0.0, 0.0, 0.0, 9.0])
    layer = eqx.tree_at(lambda m: (m.router.scores.weight, m.router.scores.bias), layer, (jnp.zeros((5, EMBED)), bias))
    y = layer(tokens)[0]
    np.testing.assert_allclose(y[:, :1], naive_mixture(layer, tokens)[:, :1], atol=1e-5)
    np.testing.assert_allclose(y[:, 1:], jax.nn.softmax(bias[jnp.array([4, 0])])[0] * tokens[:, 1:], atol=1e-5)


@pytest.mark.one_case
def test_experts_without_computation_are_counted_and_checked():
    layer = make_mixture(identities=3)
    sizes = sum(x.size for x in jax.tree.leaves(layer.experts))
    assert count_active_parameters(layer) == zoo.count(layer) - sizes // EXPERTS * (EXPERTS - 2)
    assert count_active_parameters(make_mixture(identities=3, top=6)) == zoo.count(layer)
    assert tokens_per_expert(sum_routing(layer(tokens)[1][0])).shape == (EXPERTS + 3,)
    make_router = partial(SoftmaxRouter, EMBED, EXPERTS, 2)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=f"the router chooses among 4, not 4 experts and identities={wrong}"):
            MixtureOfExperts(make_router, partial(GatedMLP, EMBED, MLP_DIM), EXPERTS, identities=wrong, key=KEY)
