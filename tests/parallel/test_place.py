"""`init` and `place` give the same shards, and warn of dims that no axis divides."""

import functools
import logging
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

import zoo
from zoo import train
from zoo.layers import Linear, RMSNorm
from zoo.parallel import Dim

KEY = jax.random.key(0)


def test_init_and_place_give_the_same_shards():
    def make(key):
        return {"linear": Linear(32, 64, in_=Dim("embed"), out=Dim("mlp"), key=key), "norm": RMSNorm(32)}

    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    initialized, placed = zoo.init(make, KEY, mesh), zoo.place(make(KEY), mesh)
    for a, b in zip(jax.tree.leaves(initialized), jax.tree.leaves(placed), strict=True):
        assert a.sharding == b.sharding
        assert jnp.array_equal(a, b)
    shapes = [shard.data.shape for shard in initialized["linear"].weight.addressable_shards]
    assert shapes == [(32, 16)] * 8
    with pytest.raises(ValueError, match=r"linear.weight: 63 mlp do not divide evenly over tensor=2"):
        zoo.init(lambda key: {"linear": Linear(32, 63, in_=Dim("embed"), out=Dim("mlp"), key=key)}, KEY, mesh)


def test_place_warns_once_of_a_replicated_vocabulary(caplog):
    mesh = zoo.make_mesh(data=2, tensor=4)
    with caplog.at_level(logging.WARNING, "zoo"):
        zoo.place(zoo.layers.Embedding(97, 32, key=KEY), mesh)
    assert [r.message for r in caplog.records] == [
        "weight: 97 vocab do not divide evenly over tensor=4 and are replicated; 100 would be sharded."
    ]


def _number_dims(params):
    number = lambda is_matrix: optax.contrib.MuonDimensionNumbers(-1, -2) if is_matrix else None
    return jax.tree.map(number, train.matrix_mask(params))


def _label(params):
    return jax.tree.map(lambda decays: "matrix" if decays else "rest", train.matrix_mask(params))


class Gram(NamedTuple):
    grams: PyTree


def scale_by_gram():
    """One factor of Shampoo, [columns, columns] in the place of [rows, columns]: as many dims, of other sizes."""

    def init(params):
        return Gram(jax.tree.map(lambda x: jnp.zeros((*x.shape[:-2], x.shape[-1], x.shape[-1])), params))

    def update(updates, state, params=None):
        matrices = jax.tree.map(jnp.atleast_2d, updates)
        grams = jax.tree.map(lambda gram, x: gram + x.swapaxes(-1, -2) @ x, state.grams, matrices)
        scaled = jax.tree.map(lambda x, gram: -(jnp.atleast_2d(x) @ gram).reshape(x.shape), updates, grams)
        return scaled, Gram(grams)

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "adafactor, not factored": lambda: optax.adafactor(1e-2, weight_decay_rate=0.1),
    "sm3": lambda: optax.sm3(1e-2),
    "gram": lambda: scale_by_gram(),
    "lion": lambda: optax.lion(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2, muon_weight_dimension_numbers=_number_dims),
    "prodigy": lambda: optax.contrib.prodigy(),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "MultiSteps": lambda: optax.MultiSteps(optax.adafactor(1e-2, min_dim_size_to_factor=8), 2),
    "masked": lambda: optax.masked(optax.adafactor(1e-2, min_dim_size_to_factor=8), train.decay_mask),
    "multi_transform": lambda: optax.multi_transform({"matrix": optax.sm3(0.1), "rest": optax.sgd(0.1)}, _label),
}
QUICK = {
    "adafactor": [],
    "sm3": [],
    **dict.fromkeys(("gram", "schedule_free", "MultiSteps", "multi_transform"), pytest.mark.ci),
}
"""Rows and columns, a vector per dim, a matrix per dim, a copy of parameters, and states inside of states."""
EACH_OPTIMIZER = [pytest.param(name, marks=QUICK.get(name, pytest.mark.slow)) for name in OPTIMIZERS]


def make_model(key, layers=2):
    return zoo.models.Transformer(vocab=16, embed=16, layers=layers, heads=2, mlp=32, tied=False, key=key)


@functools.cache
def compute_unplaced():
    """Return a model and gradients on one device, that were never placed."""
    model = make_model(KEY)
    tokens = jax.random.randint(KEY, (4, 9), 0, 16)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    def loss(model):
        total, count = zoo.cross_entropy(model, batch)
        return total / count

    return model, eqx.filter_jit(eqx.filter_grad(loss))(model)


@pytest.mark.parametrize("name", EACH_OPTIMIZER)
def test_optimizer_states_of_any_shape_step_as_unplaced_ones(name):
    """The documented lines, with states that have rows and columns, one vector per dim, or a history of parameters."""
    model, grads = compute_unplaced()
    optimizer = OPTIMIZERS[name]()

    @eqx.filter_jit
    def step(grads, state, model):
        for _ in range(2):
            updates, state = optimizer.update(grads, state, zoo.trainable(model))
            model = eqx.apply_updates(model, updates)
        return model, state

    expected = step(grads, optimizer.init(zoo.trainable(model)), model)
    for mesh in (zoo.make_mesh(devices=jax.devices()[:1]), zoo.make_mesh(data=2, fsdp=2, tensor=2)):
        placed = zoo.place(model, mesh)
        state = zoo.place(optimizer.init(zoo.trainable(placed)), mesh.optimizer)
        assert all(isinstance(x.sharding, NamedSharding) for x in jax.tree.leaves(state))
        found = step(zoo.place(grads, mesh.optimizer), state, placed)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert jnp.allclose(x, y, rtol=2e-5, atol=2e-6)


def test_place_shards_histories_and_replicates_factors():
    mesh = zoo.make_mesh(data=1, fsdp=2, tensor=4)
    model = zoo.place({"query": Linear(32, 64, in_=Dim("embed"), out=Dim("mlp"), key=KEY)}, mesh)
    history = zoo.place(optax.lbfgs(memory_size=3).init(model), mesh.optimizer)[0].diff_params_memory
    assert history["query"].weight.sharding.spec == PartitionSpec(None, "tensor", "fsdp")
    rows = zoo.place(optax.adafactor(min_dim_size_to_factor=8).init(model), mesh.optimizer)[0].v_row
    assert rows["query"].weight.shape == (32,) and rows["query"].weight.sharding.spec == PartitionSpec()
    moments = zoo.place(optax.adam(1e-3).init(model), mesh.optimizer)[0].mu
    assert moments["query"].weight.sharding == model["query"].weight.sharding


def test_place_still_raises_for_a_model_that_does_not_fit():
    """Only what lies below a named tuple is the state of an optimizer."""
    mesh = zoo.make_mesh(data=1, fsdp=2, tensor=4)
    linear = Linear(32, 64, in_=Dim("embed"), out=Dim("mlp"), key=KEY)
    flat = eqx.tree_at(lambda linear: linear.weight, linear, jnp.ones(32))
    for tree, hint in ((flat, ""), ([flat], "named tuple"), ({"state": flat}, "named tuple")):
        with pytest.raises(TypeError, match=f"weight holds an array of 1 dims.*{hint}"):
            zoo.place(tree, mesh)


def test_place_refuses_rows_and_columns_of_layers_in_rounds():
    mesh = zoo.make_mesh(pipe=2, data=-1, layout=zoo.Layout(rounds=2))
    model = eqx.filter_eval_shape(functools.partial(make_model, layers=4), KEY)
    with pytest.raises(ValueError, match=r"v_row.*cannot be dealt out in rounds=2.*per moment"):
        zoo.place(eqx.filter_eval_shape(optax.adafactor(1e-2).init, zoo.trainable(model)), mesh.optimizer)
