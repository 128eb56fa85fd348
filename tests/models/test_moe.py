"""Models with mixtures of experts: what they promise as decoders, the same on any mesh, and how balance is kept."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import BiasedRouter, MixtureOfExperts, Routing, SoftmaxRouter
from zoo.models import (
    balance_loss,
    count_active_parameters,
    cross_entropy_and_routing,
    router_z_loss,
    tokens_per_expert,
    update_expert_bias,
)

KEY = jax.random.key(0)
SIZES = {"vocab": 32, "embed": 16, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 8, "experts": 4, "top": 2}
KINDS = {
    "softmax": {},
    "sigmoid, shared, a dense layer first": {
        "router": partial(BiasedRouter, groups=2, kept_groups=1, scale=2.5),
        "shared": 8,
        "dense_layers": 1,
    },
    "a capacity": {"capacity_factor": 1.0},
}


def make(key, **options):
    return zoo.models.MixtureOfExperts(**SIZES, key=key, **options)


def text(shape, seed=1):
    return jax.random.randint(jax.random.key(seed), shape, 0, SIZES["vocab"])


def make_batch():
    """Rows of unlike length; the rest is padding."""
    tokens = text((8, 9))
    real = jnp.arange(9) < jnp.array([9, 4, 7, 9, 2, 9, 9, 5])[:, None]
    positions = jnp.broadcast_to(jnp.arange(9), tokens.shape)
    weights = real.astype(jnp.float32)
    segments = real.astype(int)
    return {"tokens": tokens, "targets": tokens, "weights": weights, "segment_ids": segments, "positions": positions}


def loss_fn(over, model, batch, key=None):
    both, routing = cross_entropy_and_routing(model, batch, balance=0.1, router_z=0.01, over=over)
    return both, [tokens_per_expert(one, batch["segment_ids"] != 0) for one in routing]


def furthest(tree, reference):
    pairs = zip(jax.tree.leaves(reference), jax.tree.leaves(tree), strict=True)
    return max(np.abs(a - b).max() / (np.abs(a).max() + 1e-12) for a, b in pairs)


@pytest.mark.parametrize("kind, over", [*zip(KINDS, ("batch", "row", "layers"), strict=True)])
def test_on_a_mesh_it_is_the_same(kind, over):
    model = make(KEY, **KINDS[kind])
    alone = zoo.make_mesh(1, devices=jax.devices()[:1])
    meshes = alone, zoo.make_mesh(data=2, fsdp=2, tensor=2)
    run = lambda mesh: zoo.value_and_grad(partial(loss_fn, over), mesh, has_aux=True)
    results = [jax.device_get(run(mesh)(zoo.place(model, mesh), make_batch())) for mesh in meshes]
    ((loss, loads), grads), ((loss_mesh, loads_mesh), grads_mesh) = results
    assert abs(loss - loss_mesh) < 1e-5 and furthest(grads_mesh, grads) < 2e-5
    assert all(map(np.array_equal, loads, loads_mesh))
    assert all(load.sum() == 2 * (9 + 4 + 7 + 9 + 2 + 9 + 9 + 5) for load in loads)


def test_of_single_rows_micro_batches_change_nothing_of_whole_batches_they_do():
    mesh = zoo.make_mesh(1, devices=jax.devices()[:1])
    losses = {
        over: [
            zoo.value(partial(loss_fn, over), mesh, has_aux=True, microbatches=n)(make(KEY), make_full_batch())[0]
            for n in (1, 4)
        ]
        for over in ("row", "batch")
    }
    assert jnp.allclose(*losses["row"], rtol=1e-6) and not jnp.allclose(*losses["batch"], rtol=1e-6)


def make_full_batch():
    return make_batch() | {"segment_ids": jnp.ones((8, 9), int), "weights": jnp.ones((8, 9))}


@pytest.fixture(scope="module")
def model():
    return make(KEY, **KINDS["sigmoid, shared, a dense layer first"])


@eqx.filter_jit
def run(model, tokens, **options):
    return model(tokens, **options)


def test_packed_equals_separate_and_padding_is_nothing(model):
    tokens = text((2, 10))
    packed = run(model, tokens, segment_ids=jnp.where(jnp.arange(10) < 4, 3, 7) * jnp.ones((2, 1), int))
    alone = run(model, jnp.roll(tokens, -4, 1))
    assert jnp.allclose(packed[:, 4:], alone[:, :6], atol=1e-5)
    padded = run(model, tokens, mask=jnp.arange(10) >= jnp.array([[4], [4]]))
    assert jnp.allclose(padded[:, 4:], alone[:, :6], atol=1e-5)


def test_generation_is_that_of_whole_passes(model):
    tokens = text((2, 6))
    new = zoo.generate(model, tokens, max_new_tokens=4)
    whole = jnp.concatenate([tokens, new], 1)
    assert (run(model, whole).argmax(-1)[:, 5:9] == new).all()


def test_what_routers_decide_leaves_the_model(model):
    stream, _ = model.hidden(text((2, 5)), zoo.layers.TokenInfo())
    assert len(stream.routing) == 2
    for one, block in zip(stream.routing, list(model.stack.iter_blocks())[1:], strict=True):
        assert one.logits.shape == (2, 5, 4) and one.chosen.shape == (2, 5, 2)
        assert isinstance(block.ffn, MixtureOfExperts)
    first = jax.tree.map(lambda x: x[0], model.stack.segments[0].blocks[0])
    assert not isinstance(first.ffn, MixtureOfExperts)


def test_dense_layers_are_as_wide_as_what_a_token_meets():
    dense, mixed = make(KEY, dense_layers=3, shared=4), make(KEY, shared=4)
    routers = 3 * 16 * 4
    assert zoo.count(dense) == count_active_parameters(dense) == count_active_parameters(mixed) - routers
    assert zoo.count(mixed) - count_active_parameters(mixed) == 3 * 2 * 3 * 16 * 8


@pytest.mark.parametrize(
    "options, message",
    [({"top": 9}, "at most all of 4 experts"), ({"dense_layers": 4}, "of 3 layers"), ({"experts": 0}, "at least 1")],
)
def test_bad_sizes_raise(options, message):
    with pytest.raises(ValueError, match=message):
        zoo.models.MixtureOfExperts(**SIZES | options, key=KEY)


def decided(chosen, logits):
    return Routing(jnp.asarray(logits, jnp.float32), jnp.asarray(chosen))


def test_a_balance_loss_is_its_formula():
    logits = jax.random.normal(KEY, (2, 3, 4))
    routing = [decided(jax.lax.top_k(logits, 2)[1], logits), decided(jax.lax.top_k(-logits, 2)[1], -logits)]
    real = jnp.array([[1, 1, 1], [1, 0, 0]], bool)

    def means(one, rows):
        """f and P over the real tokens of these rows."""
        kept = np.asarray(real[rows])
        hits = np.asarray((one.chosen[rows][..., None] == jnp.arange(4)).sum(2))[kept]
        return hits.mean(0), np.asarray(jax.nn.softmax(one.logits[rows]))[kept].mean(0)

    whole = slice(None)
    each = [4 * np.sum(np.prod(means(one, whole), 0)) for one in routing]
    assert jnp.allclose(balance_loss(routing, real), np.mean(each), rtol=1e-6)
    rows = [4 * np.sum(np.prod(means(one, slice(i, i + 1)), 0)) for one in routing for i in range(2)]
    assert jnp.allclose(balance_loss(routing, real, over="row"), np.mean(rows), rtol=1e-6)
    f, p = np.mean([means(one, whole) for one in routing], 0)
    assert jnp.allclose(balance_loss(routing, real, over="layers"), 4 * np.sum(f * p), rtol=1e-6)
    raw = jax.nn.sigmoid(logits)
    even = decided(jax.lax.top_k(logits, 2)[1], jnp.log(raw / raw.sum(-1, keepdims=True)))
    assert jnp.allclose(balance_loss(routing[:1], score="sigmoid"), balance_loss([even]), rtol=1e-6)
    squares = np.asarray(jax.nn.logsumexp(logits, -1) ** 2 + jax.nn.logsumexp(-logits, -1) ** 2)[np.asarray(real)]
    assert jnp.allclose(router_z_loss(routing, real), squares.mean() / 2, rtol=1e-6)


def test_an_even_use_of_experts_costs_top():
    chosen = jnp.array([[[0, 1], [2, 3]]])
    assert balance_loss([decided(chosen, jnp.zeros((1, 2, 4)))]) == 2
    crowded = decided(jnp.zeros((1, 2, 1), int), jnp.array([[[9.0, 0, 0, 0]] * 2]))
    assert balance_loss([crowded]) > 3.9


def test_biases_move_toward_what_is_used_too_little(model):
    loads = [jnp.array([4.0, 0.0, 2.0, 2.0]), jnp.array([0.0, 0.0, 0.0, 8.0])]
    moved = jax.jit(partial(update_expert_bias, rate=0.5))(model, loads)
    biases = jnp.concatenate([b.ffn.router.selection_bias for s in moved.stack.segments[1:] for b in s.blocks])
    assert biases.tolist() == [[-0.5, 0.5, 0, 0], [0.5, 0.5, 0.5, -0.5]]
    back = update_expert_bias(moved, [-x for x in loads], rate=0.5)
    assert eqx.tree_equal(back, model)
    with pytest.raises(ValueError, match="1 loads were given, and 2 layers have a router"):
        update_expert_bias(model, loads[:1])
    with pytest.raises(ValueError, match="no router of this model chooses with a bias"):
        update_expert_bias(make(KEY), [loads[0]] * 3)


def test_without_routers_there_is_nothing_to_balance():
    dense = zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=8, key=KEY)
    for name in ("balance", "router_z"):
        with pytest.raises(ValueError, match="no mixture of experts"):
            zoo.cross_entropy(dense, make_batch(), **{name: 0.1})


def test_a_bias_evens_out_what_a_router_prefers():
    """Loss-free balancing by itself: no gradient, one router that likes expert 0."""
    layer = MixtureOfExperts(partial(BiasedRouter, 16, 4, 1), partial(zoo.layers.GatedMLP, 16, 8), 4, key=KEY)
    tilted = layer.router.scores.weight.at[0].add(2 * jnp.ones(16))
    layer = eqx.tree_at(lambda m: m.router.scores.weight, layer, tilted)
    x = jax.random.normal(KEY, (1, 256, 16)) + 0.2

    @jax.jit
    def step(bias):
        load = tokens_per_expert(eqx.tree_at(lambda m: m.router.selection_bias, layer, bias)(x)[1][0])
        return bias + 0.02 * jnp.sign(load.mean() - load), load.max() / load.mean()

    bias, shares = layer.router.selection_bias, []
    for _ in range(60):
        bias, share = step(bias)
        shares.append(float(share))
    assert shares[0] > 2.5 and shares[-1] < 1.3


def test_softmax_is_the_usual_router():
    stacked = make(KEY).stack.segments[0].blocks[0].ffn
    assert isinstance(stacked.router, SoftmaxRouter) and stacked.router.renormalize
