"""Layers in rounds are the same layers: values, shardings, masks and counts, in any number of rounds on any mesh."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.quick import mark_slow
from zoo import Layout
from zoo.parallel import leaves, rounds
from zoo.parallel.rounds import count_rounds, map_in_one_round, merge_rounds, reshape_layers, split_rounds
from zoo.parallel.trainable_copy import TrainableCopy

KEY = jax.random.key(0)
SIZES = {"pipe": 2, "fsdp": 2, "tensor": 2}


def make(key=KEY, layers=8):
    return zoo.models.Transformer(vocab=16, embed=8, layers=layers, heads=2, mlp=16, key=key)


def make_mesh(rounds=1, **sizes):
    sizes = {"data": 1} | (sizes or SIZES)
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    return zoo.make_mesh(**sizes, devices=devices, layout=Layout(rounds=rounds))


@pytest.fixture(scope="module")
def model():
    return eqx.filter_jit(make)()


def assert_same(first, second):
    """Values, shapes, shardings and static fields."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert x.shape == y.shape and x.sharding == y.sharding
        assert isinstance(x, jax.ShapeDtypeStruct) or np.array_equal(x, y)


@pytest.mark.parametrize("rounds", mark_slow([2, 4], but=[2]))
def test_merge_rounds_undoes_place(model, rounds):
    placed, mesh = zoo.place(model, make_mesh(rounds)), make_mesh()
    assert count_rounds(placed) == rounds and count_rounds(model) == 1
    assert {leaf.dims[0].name for leaf in leaves(placed.stack)} == {"rounds"}
    assert_same(merge_rounds(placed), zoo.place(model, mesh))
    assert_same(split_rounds(zoo.place(model, mesh), rounds), placed)
    for x, y in zip(jax.tree.leaves(zoo.init(make, KEY, make_mesh(rounds))), jax.tree.leaves(placed), strict=True):
        assert x.sharding == y.sharding
        np.testing.assert_allclose(x, y, atol=1e-6)  # another program


def test_place_changes_rounds_and_meshes(model):
    placed = zoo.place(model, make_mesh(2))
    for mesh in (make_mesh(4), make_mesh(), make_mesh(2, pipe=4, tensor=2), make_mesh(fsdp=2)):
        assert_same(zoo.place(placed, mesh), zoo.place(model, mesh))
    again = zoo.place(placed, make_mesh(2))
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(placed), strict=True):
        assert x is y


def test_shapes_in_rounds_keep_their_shardings(model):
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    placed, whole = (zoo.place(model, make_mesh(rounds)) for rounds in (2, 1))
    assert_same(merge_rounds(jax.tree.map(shape, placed)), jax.tree.map(shape, whole))
    assert_same(split_rounds(jax.tree.map(shape, whole), 2), jax.tree.map(shape, placed))


def test_reshape_layers_gathers_over_pipe_alone(model):
    weight = zoo.place(model, make_mesh(2)).stack.segments[0].blocks[0].ffn.up.weight
    shape = (weight.shape[0] * weight.shape[1], *weight.shape[2:])
    result = rounds._reshape_sharding(weight.sharding, weight.ndim, shape)
    text = rounds._reshape_sharded.lower(weight, shape, weight.sharding, result).compile().as_text()
    gathers = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    assert gathers == ["2,4,8,4"]
    assert not re.search(r" (all-reduce|all-to-all|collective-permute)\(", text)


def test_rounds_of_masks_and_host_arrays(model):
    assert reshape_layers(jnp.arange(4), (2, 2)).tolist() == [[0, 1], [2, 3]]
    dealt = zoo.place(model, make_mesh(2))
    assert eqx.tree_equal(merge_rounds(jax.device_get(dealt)), jax.device_get(model))
    mask = jax.tree.map(lambda x: x.ndim > 2, model)
    assert eqx.tree_equal(merge_rounds(split_rounds(mask, 2)), mask)


def test_rounds_change_no_counts_and_no_gradients_structure(model):
    placed = zoo.place(model, make_mesh(2))
    assert zoo.count(placed) == zoo.count(model)
    trained = [leaf.name for leaf in leaves(zoo.trainable(placed))]
    assert trained == [leaf.name for leaf in leaves(zoo.trainable(model))]
    assert_same(merge_rounds(zoo.trainable(placed)), zoo.trainable(merge_rounds(placed)))


def test_trees_without_arrays_have_one_round(model):
    empty = eqx.filter(split_rounds(model, 2), lambda _: False)
    assert count_rounds(empty) == 1
    assert jax.tree.structure(merge_rounds(empty)) == jax.tree.structure(eqx.filter(model, lambda _: False))


def test_split_rounds_names_what_divides(model):
    with pytest.raises(ValueError, match=r"8 repeats of 1 layers .* rounds=3: .* zoo.models.split_ends"):
        split_rounds(model, 3)
    with pytest.raises(ValueError, match=r"4 layers do not divide evenly over pipe=8\. Use a multiple of 8"):
        zoo.place(model, make_mesh(2, pipe=8))


def test_map_in_one_round_deals_the_result_out_as_before(model):
    seen = []

    def double(model):
        seen.append(count_rounds(model))
        return jax.tree.map(lambda x: 2 * x, model)

    assert_same(map_in_one_round(double, split_rounds(model, 4)), split_rounds(double(model), 4))
    assert seen == [1, 1]


def test_trainable_copies_are_dealt_out_with_their_layers(model):
    unfrozen = zoo.adapters.unfreeze(model, r"layers\.[15]\.ffn_norm")
    copy = split_rounds(unfrozen, 2).stack.segments[0].blocks[0].ffn_norm.weight
    assert isinstance(copy, TrainableCopy) and copy.value.shape == (2, 4, 8)
    assert copy.applies.tolist() == [[False, True, False, False]] * 2
