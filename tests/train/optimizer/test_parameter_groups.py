"""Groups by dims, owners and names: every parameter in one, each updated by its optimizer, tables and errors."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import zoo
from zoo import models, train
from zoo.train.optimizer.parameter_groups import label_groups


@pytest.fixture(scope="module")
def params():
    sizes = {"vocab": 16, "embed": 8, "layers": 2, "heads": 2, "mlp": 8, "experts": 4, "top": 2}
    return zoo.trainable(models.MixtureOfExperts(**sizes, key=jax.random.key(0)))


GROUPS = {
    "vocab": "embedding",
    "choices": "scores",
    "experts": "gate up down",
    "AbstractNorm": "mixer_norm ffn_norm norm",
    "attention.query": "query",
    r"layers.*\.(key|value)\.weight": "key value",
    "default": "out",
}


def test_each_parameter_is_in_the_first_group_that_fits(params):
    labels = jax.tree.leaves(label_groups([*GROUPS][:-1], params))
    members = {group: [] for group in GROUPS}
    for label, path in zip(labels, models.list_parameter_paths(params), strict=True):
        members[label].append(path.name.split(".")[-2])
    assert {group: " ".join(names) for group, names in members.items()} == GROUPS


def test_each_group_has_its_optimizer(params):
    """Plain descent: an update is the rate of the group times the gradient."""
    rates = {group: 0.1 * (1 + i) for i, group in enumerate(GROUPS)}
    groups = {group: optax.sgd(rate) for group, rate in rates.items()}
    optimizer = train.by_dim(groups, default=groups.pop("default"))
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    labels = jax.tree.leaves(label_groups(groups, params))
    for label, update, gradient in zip(labels, jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(update, -rates[label] * gradient, rtol=1e-6)


def test_table_has_counts_and_known_rates(params):
    groups = {"choices": optax.inject_hyperparams(optax.adamw)(optax.constant_schedule(2e-3)), "vocab": optax.sgd(1.0)}
    optimizer = train.by_dim(groups, default=train.muon(0.02))
    lines = train.format_groups(groups, params, optimizer.init(params)).splitlines()
    others = f"{zoo.count(params) - 192:,}"
    assert [line.split()[:4] for line in lines] == [
        ["group", "parameters", "arrays", "rate"],
        ["choices", "64", "1", "0.002"],
        ["vocab", "128", "1", "-"],
        ["default", others, "10", "-"],
    ]
    assert lines[1].endswith("layers.*.mixture_of_experts.router.scores.weight")
    assert train.format_groups(groups, params).splitlines()[1].split()[3] == "-"


def test_groups_on_a_mesh_and_in_a_jitted_step(params):
    mesh = zoo.make_mesh(data=1, fsdp=2, tensor=2, expert=2)
    optimizer = train.by_dim({"choices": optax.adamw(1e-3)}, default=train.muon(0.02, mesh=mesh))
    placed = zoo.place(params, mesh)
    opt_state = zoo.place(optimizer.init(placed), mesh.optimizer)
    updates, _ = eqx.filter_jit(optimizer.update)(placed, opt_state, placed)
    alone = train.by_dim({"choices": optax.adamw(1e-3)}, default=train.muon(0.02))
    expected, _ = eqx.filter_jit(alone.update)(params, alone.init(params), params)
    for update, wanted in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(update, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["vocap"], "no parameter has the dim, owner or name 'vocap'. Is it vocab[?] There are .*, Linear, "),
        (["attention.quary"], "or name 'attention.quary'. Is it query[?]"),
        (["layers.1.attention"], "Is it attention[?]"),
        (["vocab", "embedding"], "'embedding' has no parameters: 'vocab', which comes before it, has embedding.weight"),
        (["["], r"the group '\[' is neither a name nor a valid pattern: unterminated"),
    ],
)
def test_groups_without_parameters_raise(params, groups, message):
    optimizer = train.by_dim(dict.fromkeys(groups, optax.sgd(1.0)), default=optax.sgd(1.0))
    with pytest.raises(ValueError, match=message):
        optimizer.init(params)


def test_the_name_of_the_default_is_taken():
    with pytest.raises(ValueError, match="'default' is the name of the group of all other parameters"):
        train.by_dim({"default": optax.sgd(1.0)}, default=optax.sgd(1.0))
