"""Inlined calls, and how the operands and results of a scan divide."""

import jax
import jax.numpy as jnp

from tests.jaxprs import equations
from zoo.tools.plan.inlining import Scan


def find_scans(function, *args):
    return [equation for equation in equations(jax.make_jaxpr(function)(*args)) if equation.primitive.name == "scan"]


def test_scan_divides_by_dims():
    """Constants of any shape, a carry of two arrays, two stacked operands and one stacked result."""
    weights, bias, total, rows = jnp.ones((3, 3)), jnp.ones(()), jnp.zeros(3), jnp.ones((5, 3))

    def step(carry, row):
        total, count = carry
        x, keep = row
        return (total + jnp.where(keep, weights @ x, bias), count + 1), x * bias

    run = lambda total: jax.lax.scan(step, (total, 0), (rows * total, jnp.arange(5) > 2))
    (scan,) = find_scans(run, total)
    found = Scan.of(scan)
    assert (found.carries, len(found.body.invars) - found.first_row, len(found.body.outvars)) == (2, 2, 3)
    assert [x.aval.shape for x in scan.invars[found.consts : found.first_row]] == [(3,), ()]
    assert [x.aval.shape for x in scan.invars[found.first_row :]] == [(5, 3), (5,)]
    assert found.consts == len(scan.invars) - 4


def test_scan_without_rows_or_carry():
    (loop,) = find_scans(lambda x: jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, length=4), jnp.ones(3))
    assert (Scan.of(loop).consts, Scan.of(loop).carries) == (0, 1)
    (rows,) = find_scans(lambda x: jax.lax.map(jnp.sin, x), jnp.ones((4, 3)))
    assert (Scan.of(rows).consts, Scan.of(rows).carries) == (0, 0)
