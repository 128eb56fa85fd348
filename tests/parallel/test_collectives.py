"""All-gather by dim, and the varying axes of a scan's carry."""

import jax
import jax.numpy as jnp

import zoo
from zoo.layers import Linear
from zoo.parallel import Dim, all_gather, scan, varying

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


def test_scan_casts_its_carry_to_the_varying_axes():
    mesh = zoo.make_mesh(data=8)

    def sums(x):
        return scan(lambda total, row: (total + row.sum(), None), jnp.zeros(()), x.T)[0][None]

    x = jnp.arange(16.0).reshape(8, 2)
    assert jnp.allclose(zoo.spmd(sums, mesh, out="batch")(x), x.sum(1))
