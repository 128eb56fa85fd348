"""What is counted of a jaxpr is what XLA compiles of it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import zoo
from zoo.tools.plan.work import count_work

STEPS = jnp.ones((3, 4, 8))


def scan_with_unused_sums(x):
    """One sum of each iteration is used, one is stacked for nothing, and one is added to a carry that nothing reads."""

    def tick(carry, step):
        used, unread = carry
        return (used + lax.psum(step, "data"), unread + lax.psum(2 * step, "data")), lax.psum(3 * step, "data")

    zeros = jnp.zeros(x.shape[1:])
    return lax.scan(tick, (zeros, zeros), x)[0][0]


def scan_that_reads_its_carry(x):
    """The sum of an iteration reaches the result through the other carry of the next."""

    def tick(carry, step):
        result, latest = carry
        return (result + latest, lax.psum(step, "data")), None

    zeros = jnp.zeros(x.shape[1:])
    return lax.scan(tick, (zeros, zeros), x)[0][0]


def scan_of_one_iteration(x):
    """A loop of one iteration is none: what it adds to the carry is not used by a next one."""

    def tick(carry, step):
        result, latest = carry
        return (result + latest, lax.psum(step, "data")), 2 * result

    return lax.scan(tick, (x[0], x[1]), x[:1])[0][0]


def print_unused_sum(x):
    jax.debug.print("{}", lax.psum(x, "data").sum())
    return lax.psum(2 * x, "data")


SUMS = {
    scan_with_unused_sums: 3,
    scan_that_reads_its_carry: 3,
    scan_of_one_iteration: 0,
    print_unused_sum: 6,
}
"""Arrays of 4 x 8 that each sums: as many as there are iterations, or steps in `STEPS`."""


@pytest.mark.parametrize("function", SUMS, ids=lambda function: function.__name__)
def test_sums_are_those_that_xla_compiles(function):
    mesh = zoo.make_mesh(devices=jax.devices()[:2])
    step = jax.jit(
        jax.shard_map(function, mesh=mesh.devices, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    )
    traced = count_work(jax.make_jaxpr(step)(STEPS), mesh.shape).collectives
    assert sum(row.bytes for row in traced) == SUMS[function] * 4 * 8 * 4
    compiled = zoo.inspect.compiled(step, jax.device_put(STEPS, jax.NamedSharding(mesh.devices, PartitionSpec())))
    assert sum(row.bytes for row in compiled.collectives) == SUMS[function] * 4 * 8 * 4


def test_products_of_loops_without_a_reader_do_not_count():
    def multiply(x):
        unread = lax.while_loop(lambda y: y.sum() < 9, lambda y: y @ x, x)
        read = lax.while_loop(lambda y: y.sum() < 8, lambda y: x @ y, x)
        return unread @ x, read @ x

    step = jax.jit(lambda x: multiply(x)[1])
    x = jnp.ones((8, 8))
    traced = count_work(jax.make_jaxpr(step)(x), {}).total_flops
    assert traced == zoo.inspect.compiled(step, x).compiled_flops == 2 * 2 * 8**3
