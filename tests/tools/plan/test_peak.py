"""Peak memory of a jaxpr: each rule against arrays counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zoo.tools.plan.peak import find_peak

SIDE = 128
UNIT = 4 * SIDE**2
"""Bytes of a float32 square; a stack has four."""
SQUARE, STACK = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((SIDE, SIDE), (4, SIDE, SIDE)))


def product_of_exp_of_tanh(a, b):
    """The hyperbolic tangents are fused into the exponentials, which the product reads from memory."""
    return jnp.exp(jnp.tanh(a)) @ b


def products_of_tanh(a, b):
    """An array that two products read, and both."""
    tanh = jnp.tanh(a)
    return tanh @ b, b @ tanh


def sum_of_tanh(a, b):
    """A reduction computes the hyperbolic tangents of the product, which it reads."""
    return jnp.tanh(a @ b).sum()


def fused_operand_lives_on(a, b):
    """The product is needed until the sum, which computes the hyperbolic tangents, beside two sorted ones."""
    tanh = jnp.tanh(a @ b)
    return jnp.sort(jnp.sort(a)) + tanh


def product_of_reshaped(stack):
    return stack.reshape(SIDE, -1) @ stack.reshape(-1, SIDE)


def loop_of_products(stack):
    """The sum, which starts from zeros in its own place, and the product of a row."""
    return lax.scan(lambda total, row: (total + row @ row, None), jnp.zeros((SIDE, SIDE)), stack)[0]


def loop_from_an_array_needed_later(a, stack):
    """The same, beside the array that the sum starts from."""
    start = a @ a
    return lax.scan(lambda total, row: (total + row @ row, None), start, stack)[0], jnp.sort(start)


def loop_of_replaced_carry(a):
    """The new carry is a product, which cannot be written over its own operand."""
    return lax.scan(lambda x, _: (x @ x, None), a @ a, length=3)[0]


def loop_of_stacked_products(stack):
    """A product is written where its row belongs."""
    return lax.map(lambda row: row @ row, stack)


def loop_of_stacked_carry(a, stack):
    """The stack of what the loop carries, the carry and a product."""

    def add(total, row):
        total = total + row @ row
        return total, total

    return lax.scan(add, a @ a, stack)[1]


def scatter_of_rows(rows, ids):
    """Rows are added to zeros in place."""
    return jnp.zeros((SIDE, SIDE)).at[ids].add(rows)


def scatter_into_an_array_needed_later(a, b, rows, ids):
    product = a @ b
    return product.at[ids].set(rows), jnp.sort(product)


def updates_in_a_loop(stack):
    """A loop that writes rows itself has one buffer for them."""

    def write(rows, number):
        row = lax.dynamic_slice(stack, (number, 0, 0), (1, SIDE, SIDE))
        return lax.dynamic_update_slice(rows, row, (number, 0, 0)), None

    return lax.scan(write, jnp.zeros_like(stack), jnp.arange(4))[0]


IDS = jax.ShapeDtypeStruct((SIDE,), jnp.int32)


@pytest.mark.parametrize(
    ("function", "arguments", "units"),
    [
        (product_of_exp_of_tanh, (SQUARE, SQUARE), 2),
        (products_of_tanh, (SQUARE, SQUARE), 3),
        (sum_of_tanh, (SQUARE, SQUARE), 1),
        (fused_operand_lives_on, (SQUARE, SQUARE), 3),
        (product_of_reshaped, (STACK,), 1),
        (loop_of_products, (STACK,), 2),
        (loop_from_an_array_needed_later, (SQUARE, STACK), 3),
        (loop_of_replaced_carry, (SQUARE,), 2),
        (loop_of_stacked_products, (STACK,), 4),
        (loop_of_stacked_carry, (SQUARE, STACK), 6),
        (scatter_of_rows, (SQUARE, IDS), 1),
        (scatter_into_an_array_needed_later, (SQUARE, SQUARE, SQUARE, IDS), 3),
        (updates_in_a_loop, (STACK,), 5),  # and the row that is read
    ],
)
def test_peak_is_that_counted_by_hand(function, arguments, units):
    peak = measure(function, *arguments)
    assert peak.bytes / UNIT == pytest.approx(units, abs=0.02)  # indices and scalars


def test_peak_names_its_arrays():
    def project(a, b):
        with jax.named_scope("mlp"):
            return jnp.tanh(a) @ b

    found = measure(project, SQUARE, SQUARE).arrays
    assert [(x.primitive, x.scope, x.shape, x.dtype, x.bytes) for x in found] == [
        ("tanh", "mlp", (SIDE, SIDE), "float32", UNIT),
        ("dot_general", "mlp", (SIDE, SIDE), "float32", UNIT),
    ]


def test_gathered_parameters_take_their_whole_size():
    """Of the update of a parameter that each device has a half of, both get all."""
    for spec, size in ((PartitionSpec("fsdp"), 0), (PartitionSpec(), UNIT)):
        sharding = NamedSharding(make_mesh(), spec)
        jaxpr = jax.make_jaxpr(lambda x, sharding=sharding: lax.with_sharding_constraint(2 * x, sharding))(SQUARE)
        assert find_peak(jaxpr, [UNIT // 2], in_place=True).bytes == size


@pytest.mark.parametrize(("in_place", "units"), [(True, 2), (False, 3)])
def test_optimizer_takes_memory_for_what_overwrites_nothing(in_place, units):
    """A gradient from `shard_map`, where a sum over devices has two arrays, and a moment and a parameter, which
    overwrite the donated ones."""

    def step(parameter, moment):
        grad = jax.shard_map(
            lambda a: lax.psum(a @ a, "fsdp"), mesh=make_mesh(), in_specs=PartitionSpec(), out_specs=PartitionSpec()
        )(parameter)
        grad = grad * jnp.minimum(1, 1 / jnp.sqrt(jnp.square(grad).sum()))
        moment = 0.9 * moment + 0.1 * grad
        return parameter - moment * jnp.sign(grad), moment

    peak = find_peak(jax.make_jaxpr(step)(SQUARE, SQUARE), [UNIT, UNIT], in_place=in_place)
    assert peak.bytes / UNIT == pytest.approx(units, abs=0.001)


def make_mesh():
    return jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def measure(function, *arguments):
    """Return the peak of one of two devices beside the arguments."""
    whole = PartitionSpec()
    mapped = jax.shard_map(function, mesh=make_mesh(), in_specs=whole, out_specs=whole, check_vma=False)
    jaxpr = jax.make_jaxpr(mapped)(*arguments)
    return find_peak(jaxpr, [0] * len(jaxpr.jaxpr.invars))
