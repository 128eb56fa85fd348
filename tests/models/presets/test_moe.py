"""The mixture-of-experts preset: its promises as a decoder, the same on any mesh, and its active parameters."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo import Layout
from zoo.layers import BiasedRouter, MixtureOfExperts, SoftmaxRouter, TokenInfo
from zoo.models import Stack, count_active_parameters, cross_entropy_and_routing, tokens_per_expert
from zoo.models.stack import swap_stack
from zoo.parallel import ZERO2, ZERO3

KEY = jax.random.key(0)
SIZES = {"vocab": 32, "embed": 16, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 8, "experts": 4, "top": 2}
VARIANTS = {
    "softmax": {},
    "sigmoid, shared, a dense layer first": {
        "router": partial(BiasedRouter, groups=2, kept_groups=1, scale=2.5),
        "shared": 8,
        "dense_layers": 1,
    },
    "a capacity": {"capacity_factor": 1.0},
}
LENGTHS = [9, 4, 7, 9, 2, 9, 9, 5]


def make(key, **options):
    return zoo.models.MixtureOfExperts(**SIZES, key=key, **options)


def random_tokens(shape, seed=1):
    return jax.random.randint(jax.random.key(seed), shape, 0, SIZES["vocab"])


def make_batch():
    """Rows of different lengths; the rest is padding."""
    tokens = random_tokens((8, 10))
    mask = jnp.arange(10) < jnp.array(LENGTHS)[:, None]
    positions = jnp.broadcast_to(jnp.arange(10), tokens.shape)
    segments = mask.astype(int)
    weights = mask.astype(jnp.float32)
    return {"tokens": tokens, "targets": tokens, "weights": weights, "segment_ids": segments, "positions": positions}


def make_full_batch():
    return make_batch() | {"segment_ids": jnp.ones((8, 10), int), "weights": jnp.ones((8, 10))}


def loss_fn(over, model, batch, key=None):
    loss, routing = cross_entropy_and_routing(model, batch, balance=0.1, router_z=0.01, over=over)
    return loss, [tokens_per_expert(layer) for layer in routing]


def largest_relative_difference(tree, reference):
    pairs = zip(jax.tree.leaves(reference), jax.tree.leaves(tree), strict=True)
    return max(np.abs(a - b).max() / (np.abs(a).max() + 1e-12) for a, b in pairs)


MESHES = [
    (ZERO3, {"data": 2, "expert": 2, "tensor": 2}),
    (Layout(expert="boxes"), {"data": 1, "fsdp": 2, "expert": 2, "context": 2}),
    (ZERO2, {"data": 1, "fsdp": 2, "expert": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant, over, layout, sizes",
    [
        pytest.param(*case, *mesh, id=case[0])
        for case, mesh in zip(zip(VARIANTS, ("batch", "row", "layers"), strict=True), MESHES, strict=True)
    ],
)
def test_moe_is_the_same_on_a_mesh(variant, over, layout, sizes):
    """The loss with balance and z-loss, the tokens of each expert, and all gradients."""
    model = make(KEY, **VARIANTS[variant])
    meshes = zoo.make_mesh(1, devices=jax.devices()[:1]), zoo.make_mesh(**sizes, layout=layout)
    run = lambda mesh: zoo.value_and_grad(partial(loss_fn, over), mesh, has_aux=True)
    results = [jax.device_get(run(mesh)(zoo.place(model, mesh), make_batch())) for mesh in meshes]
    ((loss, loads), grads), ((loss_mesh, loads_mesh), grads_mesh) = results
    assert abs(loss - loss_mesh) < 1e-5 and largest_relative_difference(grads_mesh, grads) < 2e-5
    assert all(map(np.array_equal, loads, loads_mesh))
    assert all(load.sum() == 2 * sum(LENGTHS) for load in loads)


@pytest.mark.slow
def test_moe_micro_batches_change_balance_over_batch_only():
    mesh = zoo.make_mesh(1, devices=jax.devices()[:1])
    losses = {
        over: [
            zoo.value(partial(loss_fn, over), mesh, has_aux=True, microbatches=n)(make(KEY), make_full_batch())[0]
            for n in (1, 4)
        ]
        for over in ("row", "batch")
    }
    assert jnp.allclose(*losses["row"], rtol=1e-6) and not jnp.allclose(*losses["batch"], rtol=1e-6)


@pytest.fixture(scope="module")
def model():
    return make(KEY, **VARIANTS["sigmoid, shared, a dense layer first"])


@eqx.filter_jit
def run(model, tokens, **options):
    return model(tokens, **options)


@pytest.mark.slow
def test_moe_packed_equals_separate_and_ignores_padding(model):
    tokens = random_tokens((2, 10))
    packed = run(model, tokens, segment_ids=jnp.where(jnp.arange(10) < 4, 3, 7) * jnp.ones((2, 1), int))
    separate = run(model, jnp.roll(tokens, -4, 1))
    assert jnp.allclose(packed[:, 4:], separate[:, :6], atol=1e-5)
    padded = run(model, tokens, mask=jnp.arange(10) >= jnp.array([[4], [4]]))
    assert jnp.allclose(padded[:, 4:], separate[:, :6], atol=1e-5)


@pytest.mark.slow
def test_moe_generation_equals_full_passes(model):
    tokens = random_tokens((2, 6))
    new = zoo.generate(model, tokens, max_new_tokens=4)
    text = jnp.concatenate([tokens, new], 1)
    assert (run(model, text).argmax(-1)[:, 5:9] == new).all()
    mesh = zoo.make_mesh(data=1, fsdp=2, expert=2, tensor=2)
    assert (zoo.generate(zoo.place(model, mesh), tokens, max_new_tokens=4, mesh=mesh) == new).all()


@pytest.mark.ci
def test_moe_returns_routing_decisions_with_hidden_states(model):
    info = TokenInfo(segment_ids=jnp.array([[1, 1, 1, 1, 1], [1, 2, 0, 0, 0]]))

    @eqx.filter_jit
    def list_routing(*models):
        return [model.hidden(random_tokens((2, 5)), info)[0].routing for model in models]

    routing, detailed = list_routing(model, swap_stack(zoo.configure(model, routing="tokens"), Stack.unstack))
    for sums, full, block in zip(routing, detailed, list(model.stack.iter_blocks())[1:], strict=True):
        logits, chosen = full.per_token.logits, full.per_token.chosen
        assert logits.shape == (2, 5, 4) and chosen.shape == (2, 5, 2) and sums.per_token is None
        assert sums.num_tokens.tolist() == [5, 2]
        assert (sums.visits[1] == jax.nn.one_hot(chosen[1, :2], 4).sum((0, 1))).all()
        assert jnp.allclose(sums.softmax_scores[1], jax.nn.softmax(logits)[1, :2].sum(0), rtol=1e-4)
        assert isinstance(block.ffn, MixtureOfExperts)
    assert not isinstance(next(model.stack.iter_blocks()).ffn, MixtureOfExperts)


@pytest.mark.slow
def test_moe_dense_layers_are_as_wide_as_active_experts():
    dense, sparse = make(KEY, dense_layers=3, shared=4), make(KEY, shared=4)
    routers = 3 * 16 * 4
    assert zoo.count(dense) == count_active_parameters(dense) == count_active_parameters(sparse) - routers
    assert zoo.count(sparse) - count_active_parameters(sparse) == 3 * 2 * 3 * 16 * 8


@pytest.mark.parametrize(
    "options, message",
    [({"top": 9}, "at most all of 4 experts"), ({"dense_layers": 4}, "of 3 layers"), ({"experts": 0}, "at least 1")],
)
def test_moe_refuses_sizes_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        zoo.models.MixtureOfExperts(**SIZES | options, key=KEY)


def test_moe_router_is_a_renormalized_softmax_by_default():
    ffn = make(KEY).stack.segments[0].blocks[0].ffn
    assert isinstance(ffn.router, SoftmaxRouter) and ffn.router.renormalize
