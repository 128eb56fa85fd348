"""`init` and `place` give the same shards, and `place_batch` shards rows."""

import logging

import jax
import jax.numpy as jnp
import pytest

import zoo
from zoo.layers import Linear, RMSNorm
from zoo.parallel import Dim

KEY = jax.random.key(0)


def test_init_and_place_give_the_same_shards():
    def make(key):
        return {"linear": Linear(32, 64, in_=Dim("embed"), out=Dim("mlp"), key=key), "norm": RMSNorm(32)}

    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    initialized, placed = zoo.init(make, KEY, mesh), zoo.place(make(KEY), mesh)
    for a, b in zip(jax.tree.leaves(initialized), jax.tree.leaves(placed), strict=True):
        assert a.sharding == b.sharding
        assert jnp.array_equal(a, b)
    shapes = [shard.data.shape for shard in initialized["linear"].weight.addressable_shards]
    assert shapes == [(32, 16)] * 8
    with pytest.raises(ValueError, match=r"linear.weight: 63 mlp do not share out over tensor=2"):
        zoo.init(lambda key: {"linear": Linear(32, 63, in_=Dim("embed"), out=Dim("mlp"), key=key)}, KEY, mesh)


def test_place_warns_once_of_a_replicated_vocabulary(caplog):
    mesh = zoo.make_mesh(data=2, tensor=4)
    with caplog.at_level(logging.WARNING, "zoo"):
        zoo.place(zoo.layers.Embedding(97, 32, key=KEY), mesh)
    assert [r.message for r in caplog.records] == [
        "weight: 97 vocab do not share out over tensor=4 and are replicated; 100 would be sharded."
    ]


def test_place_batch_shards_rows():
    mesh = zoo.make_mesh(data=2, fsdp=4)
    batch = zoo.place_batch({"tokens": jnp.zeros((16, 5), int), "scale": jnp.ones(())}, mesh)
    assert batch["tokens"].sharding.shard_shape((16, 5)) == (2, 5)
    with pytest.raises(ValueError, match="tokens: 6 rows do not share out over data=2 x fsdp=4"):
        zoo.place_batch({"tokens": jnp.zeros((6, 5), int)}, mesh)


def test_place_batch_checks_ids_against_the_vocabulary():
    mesh = zoo.make_mesh(data=8)
    tokens = jnp.zeros((8, 3), int).at[5, 2].set(15)
    batch = {"tokens": tokens, "targets": tokens.at[0, 0].set(-100), "weights": jnp.full((8, 3), 99.0)}
    placed = zoo.place_batch(batch, mesh, vocab=16)
    assert all(jnp.array_equal(placed[name], batch[name]) for name in batch)
    for name, message in (
        ("tokens", r"tokens: 15 is outside the vocabulary of 15 tokens$"),
        ("targets", r"targets: 15 is outside the vocabulary of 15 tokens; a negative target is ignored"),
    ):
        with pytest.raises(ValueError, match=message):
            zoo.place_batch({name: batch[name]}, mesh, vocab=15)
    with pytest.raises(ValueError, match="tokens: -100 is outside"):
        zoo.place_batch({"tokens": batch["targets"]}, mesh, vocab=16)
    with pytest.raises(TypeError, match="a batch is a mapping with tokens and targets"):
        zoo.place_batch(tokens, mesh, vocab=16)
