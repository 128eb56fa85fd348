"""Load-balancing losses equal their formulas, and bias updates even out the load of experts."""

from functools import partial
from typing import get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import AbstractMixer, BiasedRouter, MixtureOfExperts
from zoo.layers.moe.routing import Routing, sum_routing
from zoo.layers.token_info import pack_positions
from zoo.models import balance_loss, cross_entropy_and_routing, router_z_loss, tokens_per_expert, update_expert_bias
from zoo.models.load_balancing import BalanceOver
from zoo.parallel import SEQUENCE
from zoo.parallel.rounds import merge_rounds, split_rounds

KEY = jax.random.key(0)
SIZES = {"vocab": 32, "embed": 16, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 8, "experts": 4, "top": 2}


def make_routing(chosen, logits):
    return Routing(jnp.asarray(logits, jnp.float32), jnp.asarray(chosen))


@pytest.mark.ci
def test_balance_loss_equals_its_formula():
    logits = jax.random.normal(KEY, (2, 3, 4))
    decisions = [make_routing(jax.lax.top_k(x, 2)[1], x) for x in (logits, -logits)]
    mask = jnp.array([[1, 1, 1], [1, 0, 0]], bool)
    routing = [sum_routing(decision, 2 * mask.astype(int)) for decision in decisions]

    def means(layer, rows):
        """f and P over the real tokens of these rows."""
        real = np.asarray(mask[rows])
        hits = np.asarray((layer.chosen[rows][..., None] == jnp.arange(4)).sum(2))[real]
        return hits.mean(0), np.asarray(jax.nn.softmax(layer.logits[rows]))[real].mean(0)

    all_rows = slice(None)
    by_layer = [4 * np.sum(np.prod(means(layer, all_rows), 0)) for layer in decisions]
    assert jnp.allclose(balance_loss(routing), np.mean(by_layer), rtol=1e-6)
    by_row = [4 * np.sum(np.prod(means(layer, slice(i, i + 1)), 0)) for layer in decisions for i in range(2)]
    assert jnp.allclose(balance_loss(routing, over="row"), np.mean(by_row), rtol=1e-6)
    f, p = np.mean([means(layer, all_rows) for layer in decisions], 0)
    assert jnp.allclose(balance_loss(routing, over="layers"), 4 * np.sum(f * p), rtol=1e-6)
    sigmoid = jax.nn.sigmoid(logits)
    normalized = make_routing(decisions[0].chosen, jnp.log(sigmoid / sigmoid.sum(-1, keepdims=True)))
    unmasked = [sum_routing(decision) for decision in (decisions[0], normalized)]
    assert jnp.allclose(balance_loss(unmasked[:1], score="sigmoid"), balance_loss(unmasked[1:]), rtol=1e-6)
    squares = np.asarray(jax.nn.logsumexp(logits, -1) ** 2 + jax.nn.logsumexp(-logits, -1) ** 2)[np.asarray(mask)]
    assert jnp.allclose(router_z_loss(routing), squares.mean() / 2, rtol=1e-6)


def test_balance_loss_of_a_uniform_load_is_top_k():
    chosen = jnp.array([[[0, 1], [2, 3]]])
    assert balance_loss([sum_routing(make_routing(chosen, jnp.zeros((1, 2, 4))))]) == 2
    collapsed = make_routing(jnp.zeros((1, 2, 1), int), jnp.array([[[9.0, 0, 0, 0]] * 2]))
    assert balance_loss([sum_routing(collapsed)]) > 3.9


def test_balance_loss_refuses_other_names(no_type_checks):
    sums = [sum_routing(make_routing(jnp.zeros((1, 2, 1), int), jnp.zeros((1, 2, 4))))]
    for options in ({"over": "rows"}, {"score": "relu"}):
        with pytest.raises(ValueError, match=f"not '{next(iter(options.values()))}'"):
            balance_loss(sums, **options)


class PassThrough(AbstractMixer):
    """A mixer that mixes nothing, so that a test is of routers alone."""

    shards_sequence = True

    def __call__(self, x, info, state=None):
        return x, state

    def init_state(self, batch, length, dtype=jnp.float32):
        return None


def all_losses(model, batch):
    """The cross-entropy with every auxiliary loss added; loads and auxiliary losses by themselves."""
    (total, count), routing = cross_entropy_and_routing(model, batch)
    losses = jnp.stack([*(balance_loss(routing, over=over) for over in get_args(BalanceOver)), router_z_loss(routing)])
    weighted = (losses * jnp.array([0.1, 0.2, 0.3, 0.01])).sum()
    return (total + weighted * count, count), ([tokens_per_expert(layer) for layer in routing], losses * count)


def make_packed_batch():
    """Two documents and padding per row, whose borders lie anywhere in the shards of a sequence; one row is padding."""
    tokens = jax.random.randint(jax.random.key(1), (4, 8), 0, SIZES["vocab"])
    index, lengths = jnp.arange(8), jnp.array([8, 5, 0, 3])[:, None]
    segments = jnp.where(index < lengths // 2, 1, 2) * (index < lengths)
    batch = {"segment_ids": segments, "positions": pack_positions(segments), "weights": jnp.sign(segments) * 1.0}
    return {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1)} | batch


def test_balance_losses_of_shards_are_those_of_the_batch():
    """Rows and halves of rows with other numbers of tokens, on other devices."""
    logits = jax.random.normal(KEY, (4, 8, 4))
    segment_ids = (jnp.arange(8) < jnp.array([8, 5, 0, 3])[:, None]).astype(int)

    def find_losses(logits, segment_ids):
        routing = [sum_routing(make_routing(jax.lax.top_k(x, 2)[1], x), segment_ids) for x in (logits, -logits)]
        by_set = (balance_loss(routing, over=over) for over in get_args(BalanceOver))
        return jnp.stack([*by_set, router_z_loss(routing)])

    mesh = zoo.make_mesh(data=2, context=2, devices=jax.devices()[:4])
    found = zoo.spmd(find_losses, mesh, out="")(logits, segment_ids)
    np.testing.assert_allclose(found, jax.jit(find_losses)(logits, segment_ids), rtol=1e-5)


def test_auxiliary_losses_are_added_to_the_mean_over_tokens():
    """The library divides by the sum of the weights, 16 here, and an auxiliary loss has been divided already."""
    options = {"layers": 1, "kv_heads": None, "mixer": lambda *sizes, out_scale, key: PassThrough()}
    model = eqx.filter_jit(zoo.models.MixtureOfExperts)(**SIZES | options, key=KEY)

    @eqx.filter_jit
    def find_means(model, batch):
        (total, count), routing = cross_entropy_and_routing(model, batch, balance=0.1, router_z=0.01)
        plain, _ = zoo.cross_entropy(model, batch)
        return total / count, plain / count + 0.1 * balance_loss(routing) + 0.01 * router_z_loss(routing)

    np.testing.assert_allclose(*find_means(model, make_packed_batch()), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "context": 4},
        {"data": 1, "fsdp": 2, "context": 2, "tensor": 2},
    ],
    ids=("context", "SEQUENCE"),
)
def test_balance_losses_equal_one_device_under_context(sizes):
    """The second mesh also shards the tokens between sublayers over `tensor`."""
    options = {"router": BiasedRouter, "mixer": lambda *sizes, out_scale, key: PassThrough()}
    model = zoo.models.MixtureOfExperts(**SIZES | {"layers": 2, "kv_heads": None}, **options, key=KEY)
    results = []
    for mesh in (zoo.make_mesh(1, devices=jax.devices()[:1]), zoo.make_mesh(**sizes, layout=SEQUENCE)):
        run = zoo.value_and_grad(all_losses, mesh, has_aux=True)
        results.append(jax.device_get(run(zoo.place(model, mesh), make_packed_batch())))
    ((loss, (loads, losses)), gradients), ((loss_mesh, (loads_mesh, losses_mesh)), gradients_mesh) = results
    assert abs(loss - loss_mesh) < 1e-5 * loss
    np.testing.assert_allclose(losses_mesh / 16, losses / 16, rtol=1e-5)
    assert all(map(np.array_equal, loads, loads_mesh)) and all(load.sum() == 2 * 16 for load in loads)
    for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(gradients_mesh), strict=True):
        assert np.abs(x - y).max() <= 2e-5 * np.abs(x).max()
    biased, biased_mesh = (update_expert_bias(model, jax.tree.map(jnp.asarray, x)) for x in (loads, loads_mesh))
    assert eqx.tree_equal(biased, biased_mesh) and not eqx.tree_equal(biased, model)


@pytest.mark.ci
def test_balance_loss_needs_routers():
    dense = zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=8, key=KEY)
    tokens = jax.random.randint(jax.random.key(1), (8, 9), 0, SIZES["vocab"])
    for name in ("balance", "router_z"):
        with pytest.raises(ValueError, match="no mixture of experts"):
            zoo.cross_entropy(dense, {"tokens": tokens, "targets": tokens}, **{name: 0.1})


@pytest.mark.ci
def test_update_expert_bias_moves_toward_underused_experts():
    router = partial(BiasedRouter, groups=2, kept_groups=1, scale=2.5)
    model = zoo.models.MixtureOfExperts(**SIZES, router=router, shared=8, dense_layers=1, key=KEY)
    loads = [jnp.array([4.0, 0.0, 2.0, 2.0]), jnp.array([0.0, 0.0, 0.0, 8.0])]
    updated = jax.jit(partial(update_expert_bias, rate=0.5))(model, loads)
    biases = jnp.concatenate([b.ffn.router.selection_bias for s in updated.stack.segments[1:] for b in s.blocks])
    assert biases.tolist() == [[-0.5, 0.5, 0, 0], [0.5, 0.5, 0.5, -0.5]]
    restored = update_expert_bias(updated, [-x for x in loads], rate=0.5)
    assert eqx.tree_equal(restored, model)
    with pytest.raises(ValueError, match="1 loads were given, and 2 layers have a router"):
        update_expert_bias(model, loads[:1])
    with pytest.raises(ValueError, match="no router of this model chooses with a bias"):
        update_expert_bias(zoo.models.MixtureOfExperts(**SIZES, key=KEY), [loads[0]] * 3)


@pytest.mark.slow  # of layers without rounds below
def test_update_expert_bias_of_layers_in_rounds():
    model = zoo.models.MixtureOfExperts(**SIZES | {"layers": 4}, router=BiasedRouter, key=KEY)
    loads = list(jax.random.normal(KEY, (4, 4)))
    dealt = jax.jit(update_expert_bias)(split_rounds(model, 2), loads)
    assert eqx.tree_equal(merge_rounds(dealt), update_expert_bias(model, loads))
    assert not eqx.tree_equal(merge_rounds(dealt), model)


def test_selection_bias_evens_out_the_load():
    """Loss-free balancing by itself: no gradient, one router that prefers expert 0."""
    layer = MixtureOfExperts(partial(BiasedRouter, 16, 4, 1), partial(zoo.layers.GatedMLP, 16, 8), 4, key=KEY)
    tilted = layer.router.scores.weight.at[0].add(2 * jnp.ones(16))
    layer = eqx.tree_at(lambda m: m.router.scores.weight, layer, tilted)
    x = jax.random.normal(KEY, (1, 256, 16)) + 0.2

    @jax.jit
    def step(bias):
        _, (routing,) = eqx.tree_at(lambda m: m.router.selection_bias, layer, bias)(x)
        load = tokens_per_expert(sum_routing(routing))
        return bias + 0.02 * jnp.sign(load.mean() - load), load.max() / load.mean()

    bias, imbalances = layer.router.selection_bias, []
    for _ in range(60):
        bias, imbalance = step(bias)
        imbalances.append(float(imbalance))
    assert imbalances[0] > 2.5 and imbalances[-1] < 1.3


@pytest.mark.parametrize("over", get_args(BalanceOver))
def test_losses_of_padding_are_zero(over):
    """A micro-batch may hold rows of padding only, and the mean of no tokens would be NaN."""
    logits = jax.random.normal(KEY, (2, 3, 4))
    padding = [sum_routing(make_routing(jax.lax.top_k(logits, 2)[1], logits), jnp.zeros((2, 3), int))]
    assert balance_loss(padding, over=over) == 0 and router_z_loss(padding) == 0


@pytest.mark.ci
def test_loss_of_a_micro_batch_of_padding_is_finite():
    """Two of four rows are padding, and a micro-batch of their own: the loss of "row" is that of the full batch."""
    model = zoo.models.MixtureOfExperts(**SIZES, key=KEY)
    tokens = jax.random.randint(KEY, (4, 8), 0, 32)
    weights = jnp.ones((4, 8)).at[2:].set(0)
    batch = {"tokens": tokens, "targets": tokens, "weights": weights, "segment_ids": weights.astype(int)}
    batch["positions"] = pack_positions(batch["segment_ids"])
    mesh = zoo.make_mesh(devices=jax.devices()[:1])

    def find_loss(microbatches):
        loss_fn = lambda model, batch: zoo.cross_entropy(model, batch, balance=0.1, router_z=0.1)
        return zoo.value(loss_fn, mesh, microbatches=microbatches)(model, batch)

    assert jnp.isfinite(find_loss(2)) and jnp.isfinite(find_loss(1))
