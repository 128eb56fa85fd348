"""A family of a user's own: its name map, and a state dict of NumPy arrays."""

import dataclasses
import itertools
from functools import partial

import jax
import numpy as np
import pytest

import zoo
from zoo.layers import MLP, Attention, RMSNorm
from zoo.models.hf.grammar import Family
from zoo.models.hf.spec import either
from zoo.parallel.rounds import split_rounds
from zoo.weights.plan import plan_tensors


def build(config, *, key):
    layers = [(partial(Attention, 8, 2), partial(MLP, 8, 16, bias=False))] * config["depth"]
    return zoo.models.build_decoder(vocab=16, embed=8, layers=layers, norm=partial(RMSNorm, 8), tied=True, key=key)


NAMES = {
    "tokens": "embedding",
    "norm": "norm",
    "blocks.*.ln1": "layers.*.mixer_norm",
    "blocks.*.ln2": "layers.*.ffn_norm",
    "blocks.*.up": "layers.*.mlp.up",
    "blocks.*.down": "layers.*.mlp.down",
    **{f"blocks.*.{part}": f"layers.*.attention.{part}" for part in ("query", "key", "value", "out")},
}
OWN = Family(name="own", architecture="Own", build=build, names=lambda config: NAMES, defaults={"depth": 2})


def make_state():
    draw = np.random.default_rng(0)
    shapes = {"tokens": (16, 8), "norm": (8,)}
    for i in range(2):
        square = dict.fromkeys((f"blocks.{i}.{part}" for part in ("query", "key", "value", "out")), (8, 8))
        shapes |= square | {f"blocks.{i}.ln1": (8,), f"blocks.{i}.ln2": (8,)}
        shapes |= {f"blocks.{i}.up": (16, 8), f"blocks.{i}.down": (8, 16)}
    return {f"{name}.weight": draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_numpy_arrays_of_a_family_without_num_hidden_layers(tmp_path):
    state = make_state()
    model = zoo.from_torch(state, config={"model_type": "own"}, family=OWN)
    assert (model.stack.segments[0].blocks[0].mixer.key.weight[1] == state["blocks.1.key.weight"]).all()
    zoo.save(model, tmp_path)
    again = zoo.load(tmp_path, family=OWN)
    assert (again.embedding.weight == state["tokens.weight"]).all()


def test_layers_in_rounds_are_found_by_round_and_place():
    """Two rounds of four layers: layer 5 is the second of the second round."""
    model = split_rounds(build({"depth": 8}, key=jax.random.key(0)), 2)
    plans = plan_tensors(model, NAMES)
    found = [plans[f"blocks.{layer}.key.weight"].slices for layer in range(8)]
    assert [piece.index for (piece,) in found] == list(itertools.product(range(2), range(4)))
    assert {piece.shape for (piece,) in found} == {(8, 8)}


def test_table_without_a_row_names_the_parameter():
    lacking = {name: ours for name, ours in NAMES.items() if name != "blocks.*.up"}
    family = dataclasses.replace(OWN, names=lambda config: lacking)
    with pytest.raises(zoo.CheckpointError, match=r"has no row for layers\.\*\.mlp\.up\.weight"):
        zoo.from_torch(make_state(), config={"model_type": "own"}, family=family)


def test_one_layer_with_two_modules_of_one_name_raises():
    """`either` is for layers of different classes."""
    shared = either({"blocks.*.up": "layers.*.mlp.up"}, {"blocks.*.up": "layers.*.attention.query"})
    names = {name: ours for name, ours in NAMES.items() if name not in ("blocks.*.up", "blocks.*.query")} | shared
    family = dataclasses.replace(OWN, names=lambda config: names)
    with pytest.raises(zoo.CheckpointError, match=r"blocks\.0\.up\.weight would be .*query and .*up of one layer"):
        zoo.from_torch(make_state(), config={"model_type": "own"}, family=family)
