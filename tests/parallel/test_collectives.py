"""All-gather and its inverse by dim, and the varying axes of a scan's carry."""

import jax
import jax.numpy as jnp
import pytest

import zoo
from zoo.layers import Linear
from zoo.parallel import Dim, all_gather, scan, shard
from zoo.parallel.collectives import varying

KEY = jax.random.key(0)


def test_all_gather_replicates_a_sharded_dim():
    mesh = zoo.make_mesh(data=2, tensor=4)
    up = zoo.place(Linear(16, 32, in_=Dim("embed"), out=Dim("vocab"), key=KEY), mesh)
    x = jax.random.normal(KEY, (8, 16))

    def logits(up, x):
        y = all_gather(up(x), "vocab", axis=1)
        assert y.shape == (4, 32) and varying(y) == varying(x) and all_gather(y, "vocab", axis=1) is y
        return y

    y = zoo.spmd(logits, mesh, out="batch vocab")(up, x)
    assert jnp.allclose(y, x @ jnp.asarray(up.weight).T, atol=1e-5)
    assert y.sharding.spec == jax.sharding.PartitionSpec(("data",))


def test_shard_is_the_inverse_of_all_gather():
    mesh, x = zoo.make_mesh(data=2, context=4), jnp.arange(16).reshape(2, 8)

    def gather_and_shard(x):
        y = shard(all_gather(x, "seq", axis=1), "seq", axis=1)
        assert y.shape == x.shape == (1, 2) and varying(y) == varying(x)
        return y

    assert (zoo.spmd(gather_and_shard, mesh, out="batch seq")(x) == x).all()
    assert shard(x, "seq", axis=1) is x, "no mesh"
    with pytest.raises(ValueError, match="7 seq do not divide evenly over context=4: use a multiple"):
        zoo.spmd(lambda x: shard(all_gather(x, "seq", axis=1)[:, 1:], "seq", axis=1), mesh, out="batch seq")(x)


def test_scan_casts_its_carry_to_the_varying_axes():
    mesh = zoo.make_mesh(data=8)

    def sums(x):
        return scan(lambda total, row: (total + row.sum(), None), jnp.zeros(()), x.T)[0][None]

    x = jnp.arange(16.0).reshape(8, 2)
    assert jnp.allclose(zoo.spmd(sums, mesh, out="batch")(x), x.sum(1))
