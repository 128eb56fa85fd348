"""Optimizer masks follow dims, not ranks, since layers are stacked."""

import equinox as eqx
import jax

import zoo
from zoo import train
from zoo.parallel import Dim, Layout
from zoo.parallel.rounds import split_rounds


def named(tree):
    return {
        leaf.name.split(".")[-2]: x for leaf, x in zip(zoo.parallel.leaves(tree), jax.tree.leaves(tree), strict=True)
    }


def model(key):
    return zoo.models.Transformer(vocab=16, embed=8, layers=3, heads=2, mlp=8, tied=False, key=key)


def test_decay_mask_includes_stacked_matrices():
    parameters = zoo.trainable(model(jax.random.key(0)))
    for mask in (train.decay_mask(parameters), train.matrix_mask(parameters)):
        decayed = {name for name, yes in named(mask).items() if yes}
        assert decayed == {"embedding", "query", "key", "value", "out", "gate", "up", "down", "head"}
        assert set(named(mask)) - decayed == {"mixer_norm", "ffn_norm", "norm"}


def test_masks_do_not_depend_on_rounds():
    parameters = zoo.trainable(
        zoo.models.Transformer(vocab=16, embed=8, layers=4, heads=2, mlp=8, key=jax.random.key(0))
    )
    for mask in (train.decay_mask, train.matrix_mask):
        assert named(mask(split_rounds(parameters, 2))) == named(mask(parameters))


def test_matrix_mask_excludes_stacked_biases():
    linears = eqx.filter_vmap(lambda key: zoo.layers.Linear(4, 4, bias=True, key=key))
    segment = zoo.models.Segment.__new__(zoo.models.Segment)
    object.__setattr__(segment, "blocks", (linears(jax.random.split(jax.random.key(0), 3)),))
    for dim in ("layers", "ends"):
        object.__setattr__(segment, "layers", Dim(dim))
        mask = train.decay_mask(segment)
        assert mask.blocks[0].weight and not mask.blocks[0].bias


def test_tabulate_parameters_shows_sharding():
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    rows = {row.name: row for row in train.tabulate_parameters(eqx.filter_eval_shape(model, jax.random.key(0)), mesh)}
    row = rows["layers.*.attention.query.weight"]
    assert row[1:4] == ("3 x 8 x 8", "layers heads embed", "heads over tensor, embed over fsdp")
    assert row[4:] == ("float32", 192, 768)
    assert rows["head.weight"].layout == "vocab over tensor, embed over fsdp"
    assert sum(row.count for row in rows.values()) == zoo.count(model(jax.random.key(0)))


def test_tabulate_parameters_shows_layers_in_one_round():
    four = zoo.models.Transformer(vocab=16, embed=8, layers=4, heads=2, mlp=8, key=jax.random.key(0))
    mesh = zoo.make_mesh(data=1, pipe=2, fsdp=2, tensor=2, layout=Layout(rounds=2))
    rows = train.tabulate_parameters(zoo.place(four, mesh), mesh)
    assert rows == train.tabulate_parameters(four, mesh)
    row = next(row for row in rows if row.name == "layers.*.gated_mlp.up.weight")
    assert row[1:4] == ("4 x 8 x 8", "layers mlp embed", "layers over pipe, mlp over tensor, embed over fsdp")
