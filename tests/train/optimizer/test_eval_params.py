"""Schedule-free optimizers are evaluated at x, found in any state; every other optimizer at the model itself."""

import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from zoo import train
from zoo.train.optimizer.by_name import OptimizerName


@pytest.fixture(scope="module")
def problem():
    model = zoo.models.Transformer(vocab=16, embed=8, layers=2, heads=2, mlp=16, key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 16)
    return model, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@eqx.filter_jit
def measure_loss(model, batch):
    total, count = zoo.cross_entropy(model, batch)
    return total / count


def descend(optimizer, model, batch, steps=5):
    """Return the state, the model, and z of every step: the base optimizer's iterates from the same gradients."""
    opt_state = optimizer.init(zoo.trainable(model))

    @eqx.filter_jit
    def step(model, opt_state):
        gradients = zoo.trainable(eqx.filter_grad(measure_loss)(model, batch))
        updates, opt_state = optimizer.update(gradients, opt_state, zoo.trainable(model))
        return eqx.apply_updates(model, updates), opt_state

    for _ in range(steps):
        model, opt_state = step(model, opt_state)
    return opt_state, model


@pytest.mark.ci
def test_schedule_free_is_evaluated_at_the_average(problem):
    """With a constant rate and plain descent, x is the mean of z of all steps."""
    model, batch = problem
    base = optax.contrib.schedule_free(optax.sgd(0.5), 0.5)
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), base)
    iterates = []
    for steps in range(1, 6):
        opt_state, y = descend(optimizer, model, batch, steps)
        iterates.append(opt_state[1].z.norm.weight)
    x = train.eval_params(opt_state, y)
    np.testing.assert_allclose(x.norm.weight, np.mean(iterates, 0), rtol=0, atol=1e-6)
    assert measure_loss(x, batch) != measure_loss(y, batch)
    assert abs(measure_loss(x, batch) - measure_loss(y, batch)) > 1e-4
    assert x(batch["tokens"]).shape == (4, 8, 16)
    assert jax.tree.structure(x) == jax.tree.structure(y)


def test_only_the_parameters_of_a_group_move(problem):
    model, batch = problem
    groups = {"mlp": optax.contrib.schedule_free_adamw(0.01)}
    opt_state, y = descend(train.by_dim(groups, default=optax.adamw(0.01)), model, batch)
    labels = jax.tree.leaves(jax.tree.map(lambda a, b: not jnp.array_equal(a, b), train.eval_params(opt_state, y), y))
    names = [path.name.split(".")[-2] for path in zoo.models.list_parameter_paths(y)]
    assert {name for name, moved in zip(names, labels, strict=True) if moved} == {"gate", "up", "down"}


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("name", typing.get_args(OptimizerName))
def test_each_optimizer_learns_and_keeps_the_model(problem, name):
    """From a warmup that starts at 0, and with state and model donated, as recipes do."""
    model, batch = problem
    peak = {"prodigy": 1.0, "lion": 3e-3}.get(name, 3e-2)
    schedule = train.warmup_stable_decay(peak, 2, 100, 0)
    optimizer = train.make_optimizer(name, schedule, weight_decay=0.1)
    before = measure_loss(model, batch)
    model = jax.tree.map(jnp.copy, model)
    opt_state = optimizer.init(zoo.trainable(model))

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        gradients = zoo.trainable(eqx.filter_grad(measure_loss)(model, batch))
        updates, opt_state = optimizer.update(gradients, opt_state, zoo.trainable(model))
        return eqx.apply_updates(model, updates), opt_state

    for _ in range(30):
        model, opt_state = step(batch, model, opt_state)
    x = train.eval_params(opt_state, model)
    assert measure_loss(x, batch) < before - (0.001 if name == "prodigy" else 0.3)
    assert (x is model) == (name != "schedule_free")


@pytest.mark.usefixtures("no_type_checks")
def test_unknown_names_raise():
    with pytest.raises(ValueError, match="the optimizers are adamw, muon, lion, .*, not 'shampoo'"):
        train.make_optimizer("shampoo", 1e-3)


def test_averages_on_a_mesh_have_the_shardings_of_the_model():
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2, layout=zoo.parallel.ZERO1)
    make = lambda key: zoo.models.Transformer(vocab=16, embed=8, layers=2, heads=2, mlp=16, key=key)
    model = zoo.init(make, jax.random.key(0), mesh)
    optimizer = optax.contrib.schedule_free_adamw(0.1)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
    x = train.eval_params(opt_state, model)
    assert [a.sharding for a in jax.tree.leaves(x)] == [a.sharding for a in jax.tree.leaves(model)]
    np.testing.assert_allclose(x.norm.weight, model.norm.weight, rtol=1e-6)  # x = y = z at the start
