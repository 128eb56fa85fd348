"""Routing by the id of a token: the table, weights and scores, decoders, meshes, decoding, and layers without ids."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import activations, randomize
from tests.parallel.any_mesh import assert_same_step, differentiate, make_any_mesh
from zoo.layers import Attention, BiasedRouter, GatedMLP, HashRouter, MixtureOfExperts, RMSNorm
from zoo.layers.moe.router import check_score
from zoo.layers.token_info import TokenInfo
from zoo.models import build_decoder, update_expert_bias
from zoo.models.hyper_connections import make_hyper_connections
from zoo.parallel import SEQUENCE

EMBED, EXPERTS, TOP, VOCAB = 8, 4, 2, 12
KEY = jax.random.key(0)
ROUTER = partial(HashRouter, EMBED, EXPERTS, TOP, vocab=VOCAB, score="sqrt_softplus", scale=1.5)
TOKENS = jax.random.randint(jax.random.key(1), (4, 6), 0, VOCAB)


def make_model(key=KEY, *, keeps_tokens=True):
    """One layer routed by ids, one by scores and a bias."""
    norm = partial(RMSNorm, EMBED)
    attention = partial(Attention, EMBED, 2)
    routers = ROUTER, partial(BiasedRouter, EMBED, EXPERTS, TOP)
    layers = [
        (attention, partial(MixtureOfExperts, router, partial(GatedMLP, EMBED, 6), EXPERTS)) for router in routers
    ]
    wiring = make_hyper_connections(EMBED, 2, norm, keeps_tokens=keeps_tokens, key=KEY)
    return build_decoder(vocab=VOCAB, embed=EMBED, layers=layers, norm=norm, tied=True, key=key, **wiring)


def make_random():
    """Random parameters, and the table of experts as it is drawn."""
    model = make_model()
    return jax.tree.map(lambda x, y: y if jnp.issubdtype(x.dtype, jnp.integer) else x, randomize(make_model), model)


def test_experts_are_read_from_the_table_and_weighted_by_scores():
    router = ROUTER(key=KEY)
    assert router.table.shape == (VOCAB, TOP) and (router.table[:, 0] != router.table[:, 1]).all()
    assert np.unique(router.table).tolist() == list(range(EXPERTS))
    x = activations(4, 6, EMBED)
    weights, routing = eqx.tree_at(lambda x: x.tokens, router, TOKENS, is_leaf=lambda x: x is None)(x)
    np.testing.assert_array_equal(routing.chosen, np.asarray(router.table)[TOKENS])
    scores = np.log1p(np.exp(np.float64(routing.logits))) ** 0.5
    chosen = np.take_along_axis(scores, np.asarray(routing.chosen), -1)
    np.testing.assert_allclose(weights, 1.5 * chosen / chosen.sum(-1, keepdims=True), rtol=1e-5)


def test_scores_of_any_size_have_gradients():
    router = BiasedRouter(EMBED, EXPERTS, TOP, score="sqrt_softplus", key=KEY)
    logits = jnp.array([[[-300.0, -90.0, 0.0, 300.0]]])
    grads = jax.grad(lambda logits: router.choose(logits)[0][..., 0].sum())(logits)
    assert np.isfinite(grads).all()
    with pytest.raises(ValueError, match="sqrt_softplus, not 'tanh'"):
        check_score("tanh")


def test_the_choice_depends_on_the_id_only():
    """Other experts for one id change tokens of this id, and others only through attention after them."""
    model = make_random()
    table = lambda model: model.stack.segments[0].blocks[0].ffn.router.table
    run = eqx.filter_jit(lambda model: model(TOKENS))
    changed = eqx.tree_at(table, model, (table(model) + 1) % EXPERTS)
    assert np.abs(run(changed) - run(model)).max() > 1e-3
    one = eqx.tree_at(table, model, table(model).at[..., int(TOKENS[0, 3]), :].add(1) % EXPERTS)
    before = np.abs(run(one) - run(model)).max((1, 2))
    assert (before > 1e-4).tolist() == (TOKENS == TOKENS[0, 3]).any(1).tolist()


def test_a_hash_router_decides_nothing():
    """There is nothing to balance, and the table and the bias are not trained."""
    model = make_random()
    hidden, _ = model.hidden(TOKENS, TokenInfo())
    assert len(hidden.routing) == 1
    loads = [jnp.array([5.0, 1.0, 1.0, 1.0])]
    moved = update_expert_bias(model, loads, rate=0.5)
    bias = lambda model: model.stack.segments[-1].blocks[-1].ffn.router.selection_bias
    np.testing.assert_allclose(bias(moved) - bias(model), [[-0.5, 0.5, 0.5, 0.5]], atol=1e-6)
    names = {path.name for path in zoo.models.list_parameter_paths(zoo.trainable(model))}
    assert not any(name.endswith(("table", "selection_bias")) for name in names)


@pytest.mark.parametrize(
    "layout", [None, pytest.param(SEQUENCE, marks=pytest.mark.slow)], ids=["tensor", "sequence parallel"]
)
def test_meshes_equal_one_device(layout):
    batch = {"tokens": TOKENS, "targets": TOKENS}
    options = () if layout is None else (layout,)
    mesh = make_any_mesh(*options, data=2, fsdp=2, tensor=2)
    assert_same_step(differentiate(make_random(), batch, mesh), differentiate(make_random(), batch))


def test_decoding_equals_the_full_pass():
    model = make_random()
    new = zoo.generate(model, TOKENS, max_new_tokens=3)
    longer = jnp.concatenate([TOKENS, new], axis=1)
    np.testing.assert_array_equal(jnp.argmax(eqx.filter_jit(model)(longer), -1)[:, TOKENS.shape[1] - 1 : -1], new)


def test_layers_without_ids_are_refused():
    with pytest.raises(ValueError, match="a HashRouter reads the ids of tokens"):
        eqx.filter_eval_shape(make_model(keeps_tokens=False), TOKENS)
