"""Decayed products of chunks against their formula."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.recurrences import far
from zoo.ops.recurrence.chunks import decayed_product, exp_segsum


@given(st.booleans(), st.booleans(), st.integers(0, 99))
def test_decayed_product_equals_its_formula(strict, before, seed):
    draw = np.random.default_rng(seed)
    rows, columns, decay = (draw.normal(size=(16, 3)).astype(np.float32) for _ in range(3))
    decay = -np.abs(decay) * 3
    expected, ones = np.zeros((16, 16)), np.zeros((16, 16))
    for i in range(16):
        for j in range(i if strict or before else i + 1):
            between = np.exp(decay[j + 1 : i if before else i + 1].astype(np.float64).sum(0))
            expected[i, j], ones[i, j] = (rows[i] * columns[j] * between).sum(), between[0]
    rules = {"strict": strict, "exclusive": before}
    assert far(decayed_product(*map(jnp.asarray, (rows, columns, decay)), **rules), expected) < 1e-6
    assert far(exp_segsum(jnp.asarray(decay[:, 0]), **rules), ones) < 1e-6
