"""Parameters of nested dicts by a table of names: read, written back, and refused with every name that does not fit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.models.hf.grammar import fused, prefixed
from zoo.weights import read_tree, write_tree

SIZES = {"vocab": 16, "embed": 8, "layers": 4, "heads": 2, "mlp": 12}
BLOCK = {
    "query/kernel": fused("attention.query.weight", transposed=True),
    "key/kernel": fused("attention.key.weight", transposed=True),
    "value/kernel": fused("attention.value.weight", transposed=True),
    "out/kernel": fused("attention.out.weight", transposed=True),
    "gate_up": fused("gated_mlp.gate.weight", "gated_mlp.up.weight", transposed=True),
    "down": fused("gated_mlp.down.weight", transposed=True),
    "norm1/scale": "mixer_norm.weight",
    "norm2/scale": "ffn_norm.weight",
}
SHELL = {"embed/embedding": "embedding.weight", "norm/scale": "norm.weight"}


def make_table(layers):
    """The table of a model, with the layers under a name that may have a star."""
    block = prefixed("", "layers.*", BLOCK)
    return {**SHELL, **{f"{layers}/{name}": mapping for name, mapping in block.items()}}


def make_model(make=zoo.models.Transformer, **options):
    """A model of random numbers from NumPy, for which nothing compiles."""
    shapes = eqx.filter_eval_shape(lambda key: make(**SIZES, **options, key=key), jax.random.key(0))
    draw = np.random.default_rng(0)
    fill = lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype) if hasattr(x, "dtype") else x
    return jax.tree.map(fill, shapes)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.mark.parametrize("windows", [(None,), (None, 3)], ids=["one pattern", "two patterns"])
def test_layers_in_dicts_and_in_stacked_arrays(windows):
    model = make_model(windows=windows)
    apart = write_tree(model, make_table("layers_*"))
    stacked = write_tree(model, make_table("layers"))
    assert sorted(apart) == ["embed", *(f"layers_{number}" for number in range(4)), "norm"]
    assert stacked["layers"]["gate_up"].shape == (4, 8, 24)
    query = model.stack.segments[0].blocks[0].mixer.query.weight
    np.testing.assert_array_equal(apart["layers_0"]["query"]["kernel"], query[0].T)
    for number in range(4):
        np.testing.assert_array_equal(stacked["layers"]["gate_up"][number], apart[f"layers_{number}"]["gate_up"])
    empty = eqx.filter_eval_shape(lambda: model)
    for tree, table in ((apart, make_table("layers_*")), (stacked, make_table("layers"))):
        assert eqx.tree_equal(read_tree(empty, tree, table), model)


def test_heads_are_merged_and_divided(model):
    tree = write_tree(model, make_table("layers"))
    divided = {"query": (4, 8, 2, 4), "out": (4, 2, 4, 8)}
    for name, shape in divided.items():
        tree["layers"][name] = {"kernel": tree["layers"][name]["kernel"].reshape(shape)}
    assert eqx.tree_equal(read_tree(model, tree, make_table("layers")), model)
    again = write_tree(model, make_table("layers"), like=jax.eval_shape(lambda: tree))
    assert jax.tree.all(jax.tree.map(np.array_equal, again, tree))


def test_experts_stack_in_arrays_of_each_layer():
    model = make_model(zoo.models.MixtureOfExperts, experts=3, top=1)
    paths = [path.name for path in zoo.models.list_parameter_paths(model)]
    apart = {path.replace(".", "/"): path for path in paths}
    by_layer = {path.replace(".experts.*.", "/experts/").replace(".", "/"): path for path in paths}
    tree = write_tree(model, by_layer)
    assert {x.shape[0] for x in jax.tree.leaves(tree["layers"]["2"]["mixture_of_experts"]["experts"])} == {3}
    assert eqx.tree_equal(read_tree(model, tree, by_layer), model)
    assert eqx.tree_equal(read_tree(model, write_tree(model, apart), apart), model)


def test_dtype_and_sharding_are_those_of_the_model(model):
    tree = write_tree(model, make_table("layers"))
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    placed = zoo.place(zoo.cast(model, jnp.bfloat16), mesh)
    read = read_tree(placed, tree, make_table("layers"))
    for ours, wanted in zip(jax.tree.leaves(read), jax.tree.leaves(placed), strict=True):
        assert ours.dtype == wanted.dtype and ours.sharding == wanted.sharding
        np.testing.assert_array_equal(ours, wanted)
    assert write_tree(placed, make_table("layers"))["layers"]["down"].dtype == jnp.bfloat16


def test_errors_list_every_name_that_does_not_fit(model):
    table = make_table("layers")
    tree = write_tree(model, table)
    layers = tree["layers"]
    damaged = {
        **tree,
        "extra": {"bias": np.ones(3)},
        "norm": {"scale": np.ones(8, int)},
        "layers": {**layers, "down": layers["down"].swapaxes(1, 2), "gate_up": layers["gate_up"][:3]},
    }
    with pytest.raises(zoo.CheckpointError) as caught:
        read_tree(model, damaged, table)
    message = str(caught.value)
    assert "extra/bias [3] has no place" in message
    assert "norm/scale is int64: expected floating point" in message
    assert "layers/gate_up/3 [8, 24] is missing" in message
    down = "layers/down/2 is [8, 12], and layers.*.gated_mlp.down.weight asks for [12, 8]: transposed=True?"
    assert down.removesuffix(": transposed=True?") in message and down not in message  # it is transposed already
    plain = {**table, "layers/down": "layers.*.gated_mlp.down.weight"}
    with pytest.raises(zoo.CheckpointError, match=r"asks for \[8, 12\]: transposed=True\?"):
        read_tree(model, tree, plain)
    with pytest.raises(zoo.CheckpointError, match="the table of names has no row for norm.weight"):
        read_tree(model, tree, {name: ours for name, ours in table.items() if name != "norm/scale"})
    with pytest.raises(zoo.CheckpointError, match="norm/scale is str: expected an array"):
        read_tree(model, {**tree, "norm": {"scale": "x"}}, table)
    with pytest.raises(ValueError, match=r"norm_\*/scale has 1 stars, and norm.weight has other numbers"):
        read_tree(model, tree, {**table, "norm_*/scale": "norm.weight"})
    with pytest.raises(zoo.CheckpointError, match="extra/bias is in the tree and not in the table"):
        write_tree(model, table, like={**tree, "extra": {"bias": np.ones(3)}})
    with pytest.raises(zoo.CheckpointError, match=r"norm/scale is \[9\] in the tree, and \[8\] here"):
        write_tree(model, table, like={**tree, "norm": {"scale": np.ones(9)}})
    with pytest.raises(zoo.CheckpointError, match="norm/scale lies below norm, which is an array"):
        write_tree(model, {"norm": "embedding.weight", **{k: v for k, v in table.items() if k != "embed/embedding"}})


def test_other_leaves_of_a_tree():
    """Boxes as Flax puts around arrays, lists, and None."""

    class Box:
        def __init__(self, array):
            self.array = array

        def unbox(self):
            return self.array

    model = zoo.layers.RMSNorm(4)
    for tree in ({"a": [Box(np.full(4, 2.0))]}, {"a": (np.full(4, 2.0),), "none": None}):
        assert (read_tree(model, tree, {"a/0": "weight"}).weight == 2).all()
