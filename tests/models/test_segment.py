"""Ends of a pipeline: the layers that stages do not share keep numbers, parameters and results."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from zoo import Layout
from zoo.models import split_ends
from zoo.models.parameter_paths import find_differences, format_path, iterate_indices, list_parameter_paths
from zoo.models.restack import join_end_shapes
from zoo.parallel import leaves
from zoo.parallel.module import replace_option
from zoo.parallel.rounds import merge_rounds, split_rounds

KEY = jax.random.key(0)
SIZES = {"vocab": 16, "embed": 8, "heads": 2}
TOKENS = jnp.arange(12).reshape(2, 6) % 16


@pytest.fixture(scope="module")
def model():
    """A dense layer, and seven of experts."""
    make = partial(zoo.models.MixtureOfExperts, **SIZES, mlp=8, layers=8, dense_layers=1, experts=4, top=2)
    return eqx.filter_jit(make)(key=KEY)


def describe(model):
    return [(len(s.blocks), s.num_repeats, s.layers[-1].name) for s in model.stack.segments]


def number_parameters(model):
    """Map the name of each layer's parameter to its values."""
    paths, arrays = list_parameter_paths(model), jax.tree.leaves(model)
    pairs = ((path, x, index) for path, x in zip(paths, arrays, strict=True) for index in iterate_indices(path.ranges))
    return {format_path(path.name, numbers): np.asarray(x[index]) for path, x, (index, numbers) in pairs}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        pytest.param(1, [(1, 1, "ends"), (1, 7, "layers")], marks=pytest.mark.slow),
        (7, [(1, 1, "ends"), (1, 7, "layers")]),
        pytest.param(2, [(1, 1, "ends"), (1, 6, "layers"), (1, 1, "ends")], marks=pytest.mark.slow),
        (4, [(1, 1, "ends"), (1, 4, "layers"), (1, 3, "ends")]),
    ],
)
def test_split_ends_moves_as_few_repeats_as_necessary(model, stages, expected):
    split = split_ends(model, stages)
    assert describe(split) == expected
    before, after = map(number_parameters, (model, split))
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)
    assert describe(split_ends(split, stages)) == expected


@pytest.mark.ci
def test_split_ends_moves_whole_patterns():
    model = zoo.models.Transformer(**SIZES, layers=11, mlp=8, windows=(4, None), key=KEY)
    assert describe(model) == [(2, 5, "layers"), (1, 1, "ends")]
    split = split_ends(model, stages=4)
    assert describe(split) == [(2, 4, "layers"), (2, 1, "ends"), (1, 1, "ends")]
    windows = [block.mixer.window for block in split.stack.iter_blocks()]
    assert windows == [4, None] * 5 + [4]


# the numbered parameters are compared above, and test_stack.py::test_layers_run_in_order_under_pipe has the order
@pytest.mark.slow
def test_split_ends_changes_no_results(model):
    np.testing.assert_array_equal(*(eqx.filter_jit(lambda m: m(TOKENS))(m) for m in (model, split_ends(model, 4))))


def test_split_ends_fits_the_stages_of_a_mesh(model):
    mesh = zoo.make_mesh(data=1, pipe=2, devices=jax.devices()[:2], layout=Layout(rounds=2))
    with pytest.raises(ValueError, match=r"7 repeats of 1 layers do not divide evenly over rounds=2.*split_ends"):
        zoo.place(model, mesh)
    with pytest.raises(ValueError, match=r"7 layers .* pipe=2\. .*zoo\.models\.split_ends\(model, 2\)"):
        zoo.place(model, zoo.make_mesh(data=1, pipe=2, devices=jax.devices()[:2]))
    six = split_ends(model, stages=6)
    with pytest.raises(ValueError, match=r"3 layers .* pipe=2\. .*zoo\.models\.split_ends\(model, 4\)"):
        zoo.place(six, mesh)
    placed = zoo.place(split_ends(six, stages=4), mesh)
    dims = [leaves(segment)[0].dims[0].name for segment in placed.stack.segments]
    assert dims == ["ends", "rounds", "ends", "ends"]


def test_split_ends_of_optimizer_state_shapes_and_rounds(model):
    state = optax.adam(1e-3).init(zoo.trainable(model))
    split = split_ends(state, 4)
    expected = optax.adam(1e-3).init(zoo.trainable(split_ends(model, 4)))
    assert jax.tree.structure(split) == jax.tree.structure(expected)
    shapes = jax.eval_shape(lambda state: state, state)
    assert [x.shape for x in jax.tree.leaves(split_ends(shapes, 4))] == [x.shape for x in jax.tree.leaves(split)]
    six = split_ends(model, 6)
    in_rounds = split_ends(split_rounds(six, 2), 4)
    assert eqx.tree_equal(merge_rounds(in_rounds), split_ends(six, 4))
    assert in_rounds.stack.segments[1].rounds == 2


def test_split_ends_refuses_more_stages_than_repeats(model):
    with pytest.raises(ValueError, match=r"7 repeats of 1 layers are too few for 8 stages"):
        split_ends(model, 8)
    with pytest.raises(ValueError, match="stages=0"):
        split_ends(model, 0)


def test_ends_and_rounds_are_no_differences(model):
    ends = split_ends(model, 4)
    for other in (ends, split_rounds(ends, 2), zoo.trainable(ends)):
        assert list(find_differences(other, model)) == [] == list(find_differences(model, other))
    router = lambda model: model.stack.segments[2].blocks[0].ffn.router
    other = eqx.tree_at(router, ends, replace_option(router(ends), "top", 1))
    assert list(find_differences(other, model)) == ["stack.segments has 3 parts, not 2"]
    shapes = jax.eval_shape(lambda model: model, eqx.filter(ends, eqx.is_array))
    assert describe(join_end_shapes(shapes)) == describe(model)


def test_weights_of_ends_and_rounds_are_the_same_files(tmp_path):
    model = zoo.models.Transformer(**SIZES, layers=5, mlp=8, key=KEY)
    ends = split_ends(model, 4)
    for name, other in {"model": model, "ends": ends, "rounds": split_rounds(ends, 2)}.items():
        zoo.save(other, tmp_path / name)
    for file in (tmp_path / "model").iterdir():
        for name in ("ends", "rounds"):
            assert file.read_bytes() == (tmp_path / name / file.name).read_bytes()
