"""Unit triangular solves against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.recurrences import all_close
from zoo.ops.recurrence.triangular import invert_unit_triangular, solve_unit_triangular


@pytest.mark.parametrize("size", [48, 64])
def test_invert_unit_triangular_of_an_ill_conditioned_system(size):
    """Keys within 3 degrees and beta near 2: rows of the inverse alternate in sign, and all sums cancel."""
    draw = np.random.default_rng(0)
    keys = 1 + 0.05 * draw.normal(size=(3, size, 16)) / 4
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    lower = np.tril(-1.99 * keys @ keys.swapaxes(-1, -2), -1).astype(np.float32)
    expected = np.linalg.inv(np.eye(size) - lower.astype(np.float64))
    all_close(jax.jit(invert_unit_triangular)(jnp.asarray(lower)), expected, 2e-5)


def test_solve_unit_triangular_equals_numpy_with_gradients():
    draw = np.random.default_rng(1)
    lower, right = np.tril(draw.normal(size=(2, 12, 12)), -1) / 4, draw.normal(size=(2, 12, 3))
    reference = lambda lower, right: jnp.linalg.solve(jnp.eye(12) - lower, right)
    operands = [jnp.asarray(x, jnp.float32) for x in (lower, right)]
    (ours, pull), (theirs, expected) = (jax.vjp(solve, *operands) for solve in (solve_unit_triangular, reference))
    all_close((ours, pull(ours)), (theirs, expected(ours)), 1e-5)
