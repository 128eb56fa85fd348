"""`spmd` infers the sharding of results from their dims and varying axes."""

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import zoo
from tests.parallel.scale_problem import make_problem
from zoo.layers import Linear
from zoo.parallel import Dim, Module, reduce
from zoo.parallel.collectives import shard_offset

KEY = jax.random.key(0)


def test_spmd_shards_results_by_their_dims():
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    up = zoo.place(Linear(16, 32, in_=Dim("embed"), out=Dim("mlp"), key=KEY), mesh)
    x = jax.random.normal(KEY, (8, 5, 16))

    def run(up, x):
        y = zoo.parallel.gather(up)(x)
        return y, {"first": shard_offset(y, "batch", len(y)) + jnp.arange(len(y)), "total": reduce(y.sum(), over="mlp")}

    with pytest.raises(ValueError, match=r"a result named '' differs between devices along \['data', 'fsdp'\]"):
        zoo.spmd(run, mesh, out=("batch seq mlp", {"first": "batch", "total": ""}))(up, x)
    y = zoo.spmd(lambda up, x: run(up, x)[0], mesh, out="batch seq mlp")(up, x)
    assert jnp.allclose(y, x @ jnp.asarray(up.weight).T, atol=1e-5)
    rows = zoo.spmd(lambda up, x: run(up, x)[1]["first"], mesh, out="batch")(up, x)
    assert rows.tolist() == list(range(8))


class Rows(Module):
    """A result with rows, a sharded dim and a replicated scalar."""

    x: Float[Array, "batch embed"]
    wide: Float[Array, "batch mlp"]
    count: Float[Array, ""]


def test_spmd_shards_a_module_result_by_its_annotations():
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    up = zoo.place(Linear(16, 32, in_=Dim("embed"), out=Dim("mlp"), key=KEY), mesh)
    x = jax.random.normal(KEY, (8, 16))

    def run(up, x):
        return up, [Rows(x, zoo.parallel.gather(up)(x), jnp.ones(()))], x.sum(1)

    same, (rows,), sums = zoo.spmd(run, mesh, out=("", "", "batch"))(up, x)
    assert same.weight.sharding == up.weight.sharding and jnp.array_equal(same.weight, up.weight)
    assert jnp.allclose(rows.wide, x @ jnp.asarray(up.weight).T, atol=1e-5) and rows.count == 1
    for array, sharding in zip(jax.tree.leaves(rows), jax.tree.leaves(mesh.shardings(rows)), strict=True):
        assert array.sharding == sharding
    assert jnp.allclose(sums, x.sum(1), atol=1e-5)
    partial = lambda up, x: Rows(x, zoo.parallel.gather(up)(x), x.sum())
    with pytest.raises(ValueError, match=r"a result count differs between devices along \['data', 'fsdp'\]"):
        zoo.spmd(partial, mesh, out="")(up, x)


@pytest.mark.parametrize("transform", [zoo.value, zoo.value_and_grad])
def test_each_key_gives_a_loss_of_its_own(transform):
    """One program, whose rows have a key each: the rows' keys, and so the loss, follow the key of the call."""

    def noisy(model, batch, key):
        noise = jax.vmap(lambda k: jax.random.normal(k, (16,)))(key)
        return (model(batch["x"]) * noise).sum(), batch["weights"].sum()

    mesh, model, batch = make_problem(8, data=2, fsdp=2, tensor=2)
    run = transform(noisy, mesh)
    first, second, again = (run(model, batch, key=jax.random.key(seed)) for seed in (0, 1, 0))
    for a, b, c in zip(*map(jax.tree.leaves, (first, second, again)), strict=True):
        assert jnp.array_equal(a, c)
        assert jnp.abs(a - b).max() > 0.1
