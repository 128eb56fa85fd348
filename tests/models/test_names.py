"""Names of arrays as if nothing were stacked, whatever the cut; and the differences between two models."""

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
    to_snake_case,
)
from zoo.ops.attention import reference_attention
from zoo.ops.rotary import LinearScaling, Rotary
from zoo.parallel import Dim

KEY = jax.random.key(0)
SIZES = {"vocab": 16, "embed": 8, "layers": 5, "heads": 2, "mlp": 12}


def make(**options):
    """A model with numbers, none of which occurs twice in an array, and without a compilation."""
    shapes = eqx.filter_eval_shape(partial(zoo.models.Transformer, **SIZES | options), key=KEY)
    number = lambda x: jnp.asarray(np.arange(x.size, dtype="f4").reshape(x.shape))
    return jax.tree.map(lambda x: number(x) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes)


def altered(module, **statics):
    """A module with other static fields, whatever its constructor asks for."""
    new = object.__new__(type(module))
    for field in dataclasses.fields(module):
        object.__setattr__(new, field.name, statics.get(field.name, getattr(module, field.name)))
    return new


@pytest.fixture(scope="module")
def model():
    return make(windows=(4, None), qk_norm=True, tied=False)


def test_every_layer_has_its_number_whatever_the_cut(model):
    """Five layers, two kinds in turn: several segments, whose runs share out the numbers 0 to 4."""
    runs = {}
    for place, leaf in zip(list_parameter_paths(model), jax.tree.leaves(model), strict=True):
        assert len(place.ranges) == place.name.count("*")
        assert leaf.shape[: len(place.ranges)] == tuple(map(len, place.ranges))
        assert len(place.dims) == leaf.ndim
        runs.setdefault(place.name, []).extend(i for run in place.ranges for i in run)
    assert len(model.stack.segments) > 1
    assert all(sorted(numbers) == list(range(5)) for name, numbers in runs.items() if "*" in name)
    assert {name for name in runs if "*" not in name} == {"embedding.weight", "norm.weight", "head.weight"}
    modules = {name.removeprefix("layers.*.").removesuffix(".weight") for name in runs if "*" in name}
    heads = {f"attention.{name}" for name in ("query", "key", "value", "out", "query_norm", "key_norm")}
    assert modules == heads | {"mixer_norm", "ffn_norm", "gated_mlp.gate", "gated_mlp.up", "gated_mlp.down"}


def test_the_numbers_are_those_of_the_layers(model):
    """Each slice of a stacked array is the parameter of the layer that its place tells."""
    blocks = list(model.stack.iter_blocks())
    for place, leaf in zip(list_parameter_paths(model), jax.tree.leaves(model), strict=True):
        if place.name == "layers.*.attention.query.weight":
            for index, (number,) in iterate_indices(place.ranges):
                assert jnp.array_equal(leaf[index], blocks[number].mixer.query.weight)
                assert (blocks[number].mixer.window == 4) == (number % 2 == 0)


def test_numbers_hold_in_a_tree_with_holes(model):
    """Where a gradient has none of the first segments' arrays, the others' layers are still theirs."""
    first, *rest = model.stack.segments
    assert rest
    holes = eqx.tree_at(lambda m: m.stack.segments[0], model, jax.tree.map(lambda x: None, first))
    expected = [place for place in list_parameter_paths(model) if place.name.startswith("layers.")]
    found = [place for place in list_parameter_paths(holes) if place.name.startswith("layers.")]
    assert found == expected[len(expected) - len(found) :] and found


def test_dims_are_those_of_the_layer_with_the_stacked_in_front(model):
    by_name = {place.name: place for place in list_parameter_paths(model)}
    assert by_name["layers.*.attention.query.weight"].dims == (Dim("layers"), Dim("heads", 4), Dim("embed"))
    assert by_name["layers.*.attention.query_norm.weight"].dims == (Dim("layers"), Dim("head_dim"))
    assert by_name["embedding.weight"].dims == (Dim("vocab"), Dim("embed"))


def test_gradients_moments_and_shapes_have_the_names_of_their_parameters(model):
    names = [place[:2] for place in list_parameter_paths(model)]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
    for tree in (jax.tree.map(jnp.zeros_like, model), zoo.trainable(model), zoo.cast(model, jnp.bfloat16), shapes):
        assert [place[:2] for place in list_parameter_paths(tree)] == names
    holes = eqx.tree_at(lambda tree: tree.embedding, model, None)
    assert [place[:2] for place in list_parameter_paths(holes)] == [
        name for name in names if name[0] != "embedding.weight"
    ]


def test_loose_trees_and_models_taken_apart(model):
    assert [place.name for place in list_parameter_paths({"a": (jnp.ones(2), [jnp.ones(3)])})] == ["", ""]
    assert list_parameter_paths({"a": jnp.ones(2)})[0].dims == ()
    with pytest.raises(TypeError, match="are unrolled, for decoding"):
        list_parameter_paths(zoo.models.swap_stack(model, lambda stack: stack.unstack()))


def test_stars_become_numbers():
    numbers = (range(1, 8, 3), range(2))
    found = {index: format_path("layers.*.experts.*.up", chosen) for index, chosen in iterate_indices(numbers)}
    assert len(found) == 6 and found[2, 1] == "layers.7.experts.1.up"
    assert list(iterate_indices(())) == [((), ())] and format_path("norm", ()) == "norm"
    assert ParameterPath("a.*", (range(3),), list_parameter_paths({"a": jnp.ones(3)})[0].leaf).dims == ()


@pytest.mark.parametrize(
    "name, expected",
    [("GatedMLP", "gated_mlp"), ("MLP", "mlp"), ("Attention", "attention"), ("GatedDeltaNet", "gated_delta_net")],
)
def test_classes_in_snake_case(name, expected):
    assert to_snake_case(name) == expected


def test_no_difference_where_only_numbers_or_the_manner_differ(model):
    other = make(
        windows=(4, None), qk_norm=True, tied=False, implementation=reference_attention, remat="full", dropout=0.5
    )
    for one in (other, zoo.cast(model, jnp.bfloat16), jax.tree.map(lambda x: x + 1, model)):
        assert list(find_differences(one, model)) == [] == list(find_differences(model, one))


@pytest.mark.parametrize(
    "options, told",
    [
        ({"vocab": 17}, r"embedding.weight has the shape \[17, 8\], not \[16, 8\]"),
        ({"layers": 4}, r"weight has the shape \[4, .*, not \[5, "),
        ({"windows": (4,)}, "mixer.window is 4, not None"),
        ({"windows": (4, None)}, "has 2 parts, not 1"),
        ({"qk_norm": True}, "query_norm is a RMSNorm, not None"),
        ({"tied": False}, "head is a Linear, not None"),
        ({"soft_cap": 3.0}, r"mixer.soft_cap is 3.0, not None"),
        ({"rotary": Rotary(4, base=5.0)}, r"mixer.rotary is Rotary\(dim=4, base=5.0"),
        ({"rotary": Rotary(4, scaling=LinearScaling(2))}, "Linear"),
        ({"kv_heads": 1}, r"mixer.key.weight has the shape"),
    ],
)
def test_differences_are_told_by_name(options, told):
    found = list(find_differences(make(**options), make()))
    assert any(re.search(told, line) for line in found), found
    assert bool(list(find_differences(make(), make(**options))))


def test_differences_of_functions_and_classes():
    one = make()
    ffn = lambda tree: tree.stack.segments[0].blocks[0].ffn
    found = list(find_differences(eqx.tree_at(ffn, one, altered(ffn(one), activation=jax.nn.relu)), one))
    assert found == ["stack.segments.0.blocks.0.ffn.activation is relu, not silu"]
    assert list(find_differences(one, one.embedding)) == ["the model is a Decoder, not a Embedding"]
