"""Parameters are read and replaced by name, under any stacking of layers."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.models.parameter_paths import list_parameter_paths
from zoo.parallel.rounds import split_rounds

KEY = jax.random.key(0)
QUERY = "layers.{}.attention.query.weight"


def make(function, **options):
    """Build a model whose arrays have distinct values, without compiling."""
    shapes = eqx.filter_eval_shape(partial(function, **options), key=KEY)
    arange = lambda x: jnp.asarray(np.arange(x.size, dtype="f4").reshape(x.shape))
    return jax.tree.map(lambda x: arange(x) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes)


@pytest.fixture(scope="module")
def model():
    """Five layers, of two structures in turn: several segments."""
    sizes = {"vocab": 16, "embed": 8, "layers": 5, "heads": 2, "mlp": 12}
    return make(zoo.models.Transformer, **sizes, windows=(4, None))


def test_get_returns_every_layer_of_every_parameter(model):
    for path, x in zip(list_parameter_paths(model), jax.tree.leaves(model), strict=True):
        if path.ranges:
            for k, layer in enumerate(path.ranges[0]):
                assert np.array_equal(zoo.models.get(model, path.name.replace("*", str(layer))), x[k])
        else:
            assert zoo.models.get(model, path.name) is x


def test_get_reads_experts_gradients_and_stars():
    model = make(zoo.models.MixtureOfExperts, vocab=16, embed=8, layers=2, heads=2, mlp=12, experts=3, top=1)
    (path, x) = next(
        (path, x)
        for path, x in zip(list_parameter_paths(model), jax.tree.leaves(model), strict=True)
        if path.name.count("*") == 2
    )
    first, _, rest = path.name.split("*")
    assert np.array_equal(zoo.models.get(model, f"{first}1{_}2{rest}"), x[1, 2])
    assert np.array_equal(zoo.models.get(model, f"{first}*{_}2{rest}"), x[:, 2])
    assert zoo.models.get(eqx.filter(model, eqx.is_array), path.name).shape == x.shape


def test_replace_changes_that_layer_and_nothing_else(model):
    old = zoo.models.get(model, QUERY.format(3))
    new = zoo.models.replace(model, {QUERY.format(3): lambda x: -x, "norm.weight": np.full(8, 7.0)})
    assert np.array_equal(zoo.models.get(new, QUERY.format(3)), -old)
    assert np.array_equal(new.norm.weight, np.full(8, 7.0)) and new.norm.weight.dtype == jnp.float32
    back = zoo.models.replace(new, {QUERY.format(3): old, "norm.weight": model.norm.weight})
    assert eqx.tree_equal(back, model)


def test_every_layer_of_a_placed_model(model):
    placed = zoo.place(model, zoo.make_mesh(data=1, fsdp=8))
    for path in list_parameter_paths(model):
        name = path.name.replace("*", str([*path.ranges, [0]][0][0]))
        x = zoo.models.get(placed, name)
        assert np.array_equal(x, zoo.models.get(model, name)) and "fsdp" in str(x.sharding.spec)


def test_layers_in_rounds_and_on_a_mesh():
    mesh = zoo.make_mesh(data=1, fsdp=2, pipe=2, devices=jax.devices()[:4], layout=zoo.Layout(rounds=2))
    sizes = {"vocab": 16, "embed": 8, "layers": 4, "heads": 2, "mlp": 12}
    model = make(zoo.models.Transformer, **sizes)
    placed = zoo.place(model, mesh)
    for layer in range(4):
        assert np.array_equal(zoo.models.get(placed, QUERY.format(layer)), zoo.models.get(model, QUERY.format(layer)))
    names = {QUERY.format(2): jnp.zeros((8, 8)), "embedding.weight": jnp.negative}
    new = zoo.models.replace(placed, names)
    assert eqx.tree_equal(jax.device_get(new), jax.device_get(split_rounds(zoo.models.replace(model, names), 2)))
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(placed), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "layers.5.attention.query.weight",
            "has no parameter layers.5.attention.query.weight; layers.*.attention.query.weight has 0, 1, 2, 3, 4",
        ),
        ("layers.0.attention.qery.weight", "; did you mean layers.*.attention.query.weight?"),
        ("layers.0.attention", "is not an array but a module, which has layers.*.attention.key.weight, layers.*.att"),
        ("layers.*.attention.query.weight", "is in 3 arrays, which hold layers in turn: name one layer by its number"),
        ("lm_head", "; zoo.models.list_parameter_paths(model) has the names"),
    ],
)
def test_other_names_are_refused(model, name, words):
    with pytest.raises(ValueError) as raised:
        zoo.models.get(model, name)
    assert words in str(raised.value)


def test_another_shape_is_refused(model):
    with pytest.raises(ValueError, match=r"norm.weight: expected an array of shape \(8,\), got \(4,\)"):
        zoo.models.replace(model, {"norm.weight": jnp.zeros(4)})


@pytest.mark.parametrize("name", ["layers", "blocks"])
def test_layers_as_an_attribute_are_answered(model, name):
    with pytest.raises(AttributeError, match=r'zoo.models.get\(model, "layers.0.attention.query.weight"\)'):
        getattr(model, name)
