"""Load-balancing losses equal their formulas, and bias updates even out the load of experts."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import BiasedRouter, MixtureOfExperts, Routing
from zoo.models import balance_loss, router_z_loss, tokens_per_expert, update_expert_bias

KEY = jax.random.key(0)
SIZES = {"vocab": 32, "embed": 16, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 8, "experts": 4, "top": 2}


def make_routing(chosen, logits):
    return Routing(jnp.asarray(logits, jnp.float32), jnp.asarray(chosen))


def test_balance_loss_equals_its_formula():
    logits = jax.random.normal(KEY, (2, 3, 4))
    routing = [make_routing(jax.lax.top_k(x, 2)[1], x) for x in (logits, -logits)]
    mask = jnp.array([[1, 1, 1], [1, 0, 0]], bool)

    def means(layer, rows):
        """f and P over the real tokens of these rows."""
        real = np.asarray(mask[rows])
        hits = np.asarray((layer.chosen[rows][..., None] == jnp.arange(4)).sum(2))[real]
        return hits.mean(0), np.asarray(jax.nn.softmax(layer.logits[rows]))[real].mean(0)

    all_rows = slice(None)
    by_layer = [4 * np.sum(np.prod(means(layer, all_rows), 0)) for layer in routing]
    assert jnp.allclose(balance_loss(routing, mask), np.mean(by_layer), rtol=1e-6)
    by_row = [4 * np.sum(np.prod(means(layer, slice(i, i + 1)), 0)) for layer in routing for i in range(2)]
    assert jnp.allclose(balance_loss(routing, mask, over="row"), np.mean(by_row), rtol=1e-6)
    f, p = np.mean([means(layer, all_rows) for layer in routing], 0)
    assert jnp.allclose(balance_loss(routing, mask, over="layers"), 4 * np.sum(f * p), rtol=1e-6)
    sigmoid = jax.nn.sigmoid(logits)
    normalized = make_routing(routing[0].chosen, jnp.log(sigmoid / sigmoid.sum(-1, keepdims=True)))
    assert jnp.allclose(balance_loss(routing[:1], score="sigmoid"), balance_loss([normalized]), rtol=1e-6)
    squares = np.asarray(jax.nn.logsumexp(logits, -1) ** 2 + jax.nn.logsumexp(-logits, -1) ** 2)[np.asarray(mask)]
    assert jnp.allclose(router_z_loss(routing, mask), squares.mean() / 2, rtol=1e-6)


def test_balance_loss_of_a_uniform_load_is_top_k():
    chosen = jnp.array([[[0, 1], [2, 3]]])
    assert balance_loss([make_routing(chosen, jnp.zeros((1, 2, 4)))]) == 2
    collapsed = make_routing(jnp.zeros((1, 2, 1), int), jnp.array([[[9.0, 0, 0, 0]] * 2]))
    assert balance_loss([collapsed]) > 3.9


def test_balance_loss_needs_routers():
    dense = zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=8, key=KEY)
    tokens = jax.random.randint(jax.random.key(1), (8, 9), 0, SIZES["vocab"])
    for name in ("balance", "router_z"):
        with pytest.raises(ValueError, match="no mixture of experts"):
            zoo.cross_entropy(dense, {"tokens": tokens, "targets": tokens}, **{name: 0.1})


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


def test_selection_bias_evens_out_the_load():
    """Loss-free balancing by itself: no gradient, one router that prefers expert 0."""
    layer = MixtureOfExperts(partial(BiasedRouter, 16, 4, 1), partial(zoo.layers.GatedMLP, 16, 8), 4, key=KEY)
    tilted = layer.router.scores.weight.at[0].add(2 * jnp.ones(16))
    layer = eqx.tree_at(lambda m: m.router.scores.weight, layer, tilted)
    x = jax.random.normal(KEY, (1, 256, 16)) + 0.2

    @jax.jit
    def step(bias):
        load = tokens_per_expert(eqx.tree_at(lambda m: m.router.selection_bias, layer, bias)(x)[1][0])
        return bias + 0.02 * jnp.sign(load.mean() - load), load.max() / load.mean()

    bias, imbalances = layer.router.selection_bias, []
    for _ in range(60):
        bias, imbalance = step(bias)
        imbalances.append(float(imbalance))
    assert imbalances[0] > 2.5 and imbalances[-1] < 1.3
