"""Peak memory of a jaxpr: what each rule about a compiler adds, against numbers counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zoo.tools.plan.compilers import RULES, CompilerRules
from zoo.tools.plan.liveness import find_peak

SIDE = 128
UNIT = 4 * SIDE**2
"""Bytes of a float32 square, of which an argument has one, a stack four, and halves two."""
SQUARE, STACK, HALVES = (
    jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((SIDE, SIDE), (4, SIDE, SIDE), (4, SIDE, SIDE // 2))
)


def narrow_product(a, b):
    return a @ b[:, : SIDE // 2]


def product_of_tanh(a, b):
    return jnp.tanh(a) @ b


def deep_product(stack):
    return stack.reshape(SIDE, -1) @ stack.reshape(-1, SIDE)


def scatter_before_products(a, b):
    return lax.psum_scatter(a @ b, "fsdp", tiled=True), a @ (b @ a)


def small_product_before_sorts(a, b):
    """The product is a result; sorting twice needs its operand no longer."""
    h = a @ b
    return a[:8] @ h, jnp.sort(jnp.sort(h))


def small_product_scattered_before_a_loop(a, b):
    """The same, with a loop that sorts."""
    h = a @ b
    product = a[:8] @ h
    sorted_ = lax.scan(lambda x, _: (jnp.sort(x), None), h, length=2)[0]
    return lax.psum_scatter(product, "fsdp", tiled=True), sorted_


def loop_from_zeros_after_sorts(a, stack):
    return jnp.sort(jnp.sort(a)), lax.scan(lambda total, row: (total + row, None), jnp.zeros_like(a), stack)[0]


def loop_of_stacked_scatters(stack):
    return lax.scan(lambda _, row: (None, lax.psum_scatter(row @ row, "fsdp", tiled=True)), None, stack)[1]


def loop_of_scatters_that_it_needs(stack):
    """What the next iteration needs, too, is not scattered an iteration later."""

    def scatter(half, row):
        half = half + lax.psum_scatter(row @ row, "fsdp", tiled=True)
        return half, half

    return lax.scan(scatter, jnp.zeros((SIDE // 2, SIDE)), stack)[1]


def loop_of_added_scatters(stack):
    def add(total, row):
        return total + lax.psum_scatter(row @ row, "fsdp", tiled=True), None

    return lax.scan(add, jnp.zeros((SIDE // 2, SIDE)), stack)[0]


def loop_of_products(stack):
    return lax.scan(lambda total, row: (total + row @ row, None), jnp.zeros((SIDE, SIDE)), stack)[0]


def two_loops_of_unknown_length(a, b):
    product = a @ b

    def add(sums):
        return lax.while_loop(lambda sums: sums < 100, lambda sums: sums + product.sum() + 1, sums)

    return add(add(a[0, 0]))


def loop_of_gathered_columns(stack):
    def add(total, row):
        return total + lax.all_gather(row, "fsdp", axis=1, tiled=True), None

    return lax.scan(add, jnp.zeros((SIDE, SIDE)), stack)[0]


def loop_of_loops_of_casts(stack):
    def add(total, row):
        return total + lax.all_gather(row.astype(jnp.bfloat16), "fsdp", tiled=True).sum(dtype=jnp.float32), None

    def run(total, _):
        return lax.scan(add, total, stack)[0], None

    return lax.scan(run, jnp.zeros(()), None, length=2)[0]


@pytest.mark.parametrize(
    ("function", "arguments", "base", "rule", "change"),
    [
        (product_of_tanh, (SQUARE, SQUARE), 2, {"arithmetic_into_products": True}, -1),
        (deep_product, (STACK,), 1, {"tiles": 1}, 0),
        (deep_product, (STACK,), 1, {"tiles": 132}, 1),  # 512 rows in two partial sums of 256
        (narrow_product, (SQUARE, SQUARE), 0.5, {"pads": True}, 0.5),
        (scatter_before_products, (SQUARE, SQUARE), 2.5, {"postpones": True}, 0.5),
        (small_product_before_sorts, (SQUARE, SQUARE), 2 + 1 / 16, {"postpones_weight_gradients": True}, 1 - 1 / 16),
        (small_product_before_sorts, (SQUARE, SQUARE), 2 + 1 / 16, {"postpones_beside_loops": True}, 0),
        (
            small_product_scattered_before_a_loop,
            (SQUARE, SQUARE),
            2 + 1 / 16,
            {"postpones_beside_loops": True},
            1 - 1 / 16,
        ),
        (loop_from_zeros_after_sorts, (SQUARE, STACK), 2, {"early_zeros": True}, 1),
        (loop_of_stacked_scatters, (STACK,), 3, {"pipelines_scatters": True}, 1),
        (loop_of_stacked_scatters, (STACK,), 3, {"pipelines_scatters": True, "postpones": True}, 1),
        (loop_of_scatters_that_it_needs, (STACK,), 3.5, {"pipelines_scatters": True}, 0),
        (loop_of_added_scatters, (STACK,), 2, {"scatters_after_loops": True}, 0.5),
        (loop_of_products, (STACK,), 2, {"copies_rows": True}, 1),
        (two_loops_of_unknown_length, (SQUARE, SQUARE), 1, {"copies_for_loops": True}, 1),
        (loop_of_gathered_columns, (HALVES,), 2, {"transposes_gathered": True}, 2),
        (loop_of_loops_of_casts, (STACK,), 1.5, {"casts_before_loops": True}, 2),
    ],
)
def test_each_rule_changes_the_peak_by_what_it_says(function, arguments, base, rule, change, monkeypatch):
    monkeypatch.setitem(RULES, "cpu", CompilerRules())
    without = measure(function, *arguments)
    monkeypatch.setitem(RULES, "cpu", CompilerRules(**rule))
    assert (without / UNIT, measure(function, *arguments) / UNIT) == pytest.approx((base, base + change), abs=1e-3)


def test_sum_over_devices_takes_the_place_of_its_operand():
    assert measure(lambda a, b: lax.psum(a @ b, "fsdp"), SQUARE, SQUARE) == UNIT


def test_gathered_parameters_take_their_whole_size():
    """Of the update of a parameter that each device has a half of, both get all."""
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def update(parameter, spec):
        return lax.with_sharding_constraint(2 * parameter, NamedSharding(mesh, spec))

    for spec, size in ((PartitionSpec("fsdp"), 0), (PartitionSpec(), UNIT)):
        jaxpr = jax.make_jaxpr(update, static_argnums=1)(SQUARE, spec).jaxpr
        assert find_peak(jaxpr, [UNIT // 2], in_place=True).bytes == size


def measure(function, *arguments):
    """Return the bytes of one of two devices beside the arguments."""
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    whole = PartitionSpec()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    jaxpr = jax.make_jaxpr(mapped)(*arguments).jaxpr
    return find_peak(jaxpr, [0] * len(jaxpr.invars)).bytes
