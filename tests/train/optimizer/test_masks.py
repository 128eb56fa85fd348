"""Optimizer masks follow dims, not ranks, since layers are stacked."""

import equinox as eqx
import jax

import zoo
from zoo import train
from zoo.parallel import Dim
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
