"""Parameter paths do not depend on how layers are stacked; differences between two models are found by path."""

import dataclasses
import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.models.parameter_paths import (
    ParameterPath,
    find_differences,
    format_path,
    iterate_indices,
    list_parameter_paths,
    list_parameters,
    map_parameters,
)
from zoo.models.stack import swap_stack
from zoo.ops.attention import reference_attention
from zoo.ops.rotary import LinearScaling, Rotary
from zoo.parallel import Dim
from zoo.parallel.rounds import split_rounds

KEY = jax.random.key(0)
SIZES = {"vocab": 16, "embed": 8, "layers": 5, "heads": 2, "mlp": 12}


def make(**options):
    """Build a model whose arrays have distinct values, without compiling."""
    shapes = eqx.filter_eval_shape(partial(zoo.models.Transformer, **SIZES | options), key=KEY)
    arange = lambda x: jnp.asarray(np.arange(x.size, dtype="f4").reshape(x.shape))
    return jax.tree.map(lambda x: arange(x) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes)


def replace_statics(module, **statics):
    """Replace static fields, bypassing the constructor."""
    new = object.__new__(type(module))
    for field in dataclasses.fields(module):
        object.__setattr__(new, field.name, statics.get(field.name, getattr(module, field.name)))
    return new


@pytest.fixture(scope="module")
def model():
    return make(windows=(4, None), qk_norm=True, tied=False)


def test_paths_number_every_layer_under_any_pattern(model):
    """Five layers, two structures in turn: several segments, whose ranges partition the numbers 0 to 4."""
    numbers = {}
    for path, leaf in zip(list_parameter_paths(model), jax.tree.leaves(model), strict=True):
        assert len(path.ranges) == path.name.count("*")
        assert leaf.shape[: len(path.ranges)] == tuple(map(len, path.ranges))
        assert len(path.dims) == leaf.ndim
        numbers.setdefault(path.name, []).extend(i for layers in path.ranges for i in layers)
    assert len(model.stack.segments) > 1
    assert all(sorted(layers) == list(range(5)) for name, layers in numbers.items() if "*" in name)
    assert {name for name in numbers if "*" not in name} == {"embedding.weight", "norm.weight", "head.weight"}
    modules = {name.removeprefix("layers.*.").removesuffix(".weight") for name in numbers if "*" in name}
    heads = {f"attention.{name}" for name in ("query", "key", "value", "out", "query_norm", "key_norm")}
    assert modules == heads | {"mixer_norm", "ffn_norm", "gated_mlp.gate", "gated_mlp.up", "gated_mlp.down"}


def test_paths_index_the_parameters_of_their_layers(model):
    """Each slice of a stacked array is the parameter of the layer with that number."""
    blocks = list(model.stack.iter_blocks())
    for path, leaf in zip(list_parameter_paths(model), jax.tree.leaves(model), strict=True):
        if path.name == "layers.*.attention.query.weight":
            for index, (number,) in iterate_indices(path.ranges):
                assert jnp.array_equal(leaf[index], blocks[number].mixer.query.weight)
                assert (blocks[number].mixer.window == 4) == (number % 2 == 0)


def test_paths_hold_in_a_tree_with_holes(model):
    """In a gradient without the arrays of the first segment, the other layers keep their numbers."""
    first, *rest = model.stack.segments
    assert rest
    holes = eqx.tree_at(lambda m: m.stack.segments[0], model, jax.tree.map(lambda x: None, first))
    expected = [path for path in list_parameter_paths(model) if path.name.startswith("layers.")]
    found = [path for path in list_parameter_paths(holes) if path.name.startswith("layers.")]
    assert found == expected[len(expected) - len(found) :] and found


def test_paths_have_dims_with_the_stacked_ones_first(model):
    by_name = {path.name: path for path in reversed(list_parameter_paths(model))}  # ends are last
    assert by_name["layers.*.attention.query.weight"].dims == (Dim("layers"), Dim("heads", 4), Dim("embed"))
    assert by_name["layers.*.attention.query_norm.weight"].dims == (Dim("layers"), Dim("head_dim"))
    assert by_name["embedding.weight"].dims == (Dim("vocab"), Dim("embed"))


def test_paths_of_gradients_and_shapes_are_those_of_parameters(model):
    names = [path[:2] for path in list_parameter_paths(model)]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
    for tree in (jax.tree.map(jnp.zeros_like, model), zoo.trainable(model), zoo.cast(model, jnp.bfloat16), shapes):
        assert [path[:2] for path in list_parameter_paths(tree)] == names
    holes = eqx.tree_at(lambda tree: tree.embedding, model, None)
    assert [path[:2] for path in list_parameter_paths(holes)] == [
        name for name in names if name[0] != "embedding.weight"
    ]


@pytest.mark.one_case
@pytest.mark.parametrize("experts", [None, 3])
def test_paths_do_not_depend_on_rounds(experts):
    make = zoo.models.Transformer if experts is None else partial(zoo.models.MixtureOfExperts, experts=experts, top=2)
    model = make(**SIZES | {"layers": 6}, key=KEY)
    dealt = split_rounds(model, 2)
    unfrozen = zoo.adapters.unfreeze(model, "norm")
    for one, other in ((model, dealt), (unfrozen, split_rounds(unfrozen, 2))):
        assert [path[:2] for path in list_parameter_paths(other)] == [path[:2] for path in list_parameter_paths(one)]
    for path, x in zip(list_parameter_paths(dealt), jax.tree.leaves(dealt), strict=True):
        assert len(path.dims) == x.ndim
        if path.name.startswith("layers.*."):
            assert x.shape[: len(path.ranges) + 1] == (2, 3, *map(len, path.ranges[1:]))
            rest = (1,) * (len(path.ranges) - 1)
            assert [path.locate((layer, *rest), x.shape) for layer in (0, 2, 4)] == [
                (0, 0, *rest),
                (0, 2, *rest),
                (1, 1, *rest),
            ]
        else:
            assert x.shape[: len(path.ranges)] == tuple(map(len, path.ranges))
            assert path.locate((), x.shape) == ()
    listed = list_parameters(dealt)
    assert [path[:2] for path, _ in listed] == [path[:2] for path in list_parameter_paths(model)]
    assert all(x is y or (x == y).all() for (_, x), y in zip(listed, jax.tree.leaves(model), strict=True))
    doubled = map_parameters(lambda path, x: x * len(path.ranges), dealt)
    expected = map_parameters(lambda path, x: x * len(path.ranges), model)
    assert all(map(np.array_equal, jax.tree.leaves(doubled), jax.tree.leaves(split_rounds(expected, 2))))


def test_paths_of_plain_trees_and_unrolled_models(model):
    assert [path.name for path in list_parameter_paths({"a": (jnp.ones(2), [jnp.ones(3)])})] == ["", ""]
    assert list_parameter_paths({"a": jnp.ones(2)})[0].dims == ()
    with pytest.raises(TypeError, match="are unrolled, for decoding"):
        list_parameter_paths(swap_stack(model, lambda stack: stack.unstack()))


def test_format_path_replaces_stars_by_numbers():
    ranges = (range(1, 8, 3), range(2))
    names = {index: format_path("layers.*.experts.*.up", numbers) for index, numbers in iterate_indices(ranges)}
    assert len(names) == 6 and names[2, 1] == "layers.7.experts.1.up"
    assert list(iterate_indices(())) == [((), ())] and format_path("norm", ()) == "norm"
    assert ParameterPath("a.*", (range(3),), list_parameter_paths({"a": jnp.ones(3)})[0].leaf).dims == ()


def test_find_differences_ignores_values_and_implementations(model):
    other = make(
        windows=(4, None), qk_norm=True, tied=False, implementation=reference_attention, remat="full", dropout=0.5
    )
    for equal in (other, zoo.cast(model, jnp.bfloat16), jax.tree.map(lambda x: x + 1, model)):
        assert list(find_differences(equal, model)) == [] == list(find_differences(model, equal))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"vocab": 17}, r"embedding.weight has the shape \[17, 8\], not \[16, 8\]"),
        ({"layers": 4}, r"weight has the shape \[4, .*, not \[5, "),
        ({"windows": (4,)}, "mixer.window is 4, not None"),
        ({"windows": (4, None)}, "has 2 parts, not 1"),
        ({"qk_norm": True}, "query_norm is RMSNorm, not None"),
        ({"tied": False}, "head is Linear, not None"),
        ({"soft_cap": 3.0}, r"mixer.soft_cap is 3.0, not None"),
        ({"rotary": Rotary(4, base=5.0)}, r"mixer.rotary is Rotary\(dim=4, base=5.0"),
        ({"rotary": Rotary(4, scaling=LinearScaling(2))}, "Linear"),
        ({"kv_heads": 1}, r"mixer.key.weight has the shape"),
    ],
)
def test_find_differences_names_the_parameter(options, message):
    differences = list(find_differences(make(**options), make()))
    assert any(re.search(message, line) for line in differences), differences
    assert bool(list(find_differences(make(), make(**options))))


def test_find_differences_of_functions_and_classes():
    model = make()
    ffn = lambda tree: tree.stack.segments[0].blocks[0].ffn
    other = eqx.tree_at(ffn, model, replace_statics(ffn(model), activation=jax.nn.relu))
    assert list(find_differences(other, model)) == ["stack.segments.0.blocks.0.ffn.activation is relu, not silu"]
    assert list(find_differences(model, model.embedding)) == ["the model is Decoder, not Embedding"]
