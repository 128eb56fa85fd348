"""`init` and `place` give the same shards, and warn of dims that no axis divides."""

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
