"""The mLSTM with extreme gates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quick import mark_slow
from tests.recurrences import BATCH, assert_shards_equal_one_device, draw_documents, draw_gated, far
from zoo.ops.recurrence.mlstm import mlstm


@pytest.mark.parametrize("mode", mark_slow(["recurrent", "chunked"], but=["chunked"]))
def test_mlstm_is_finite_for_gates_of_any_size(mode):
    """Gates of exp(±80) and beyond give finite outputs and gradients, and segments are independent."""
    query, key, value, _, _ = draw_gated(20, "none")
    draw = np.random.default_rng(3)
    gates = [jnp.asarray(100 * draw.normal(size=(BATCH, 20, 2)), jnp.float32) for _ in range(2)]
    ids = jnp.broadcast_to(jnp.arange(20) // 12, (BATCH, 20))
    run = jax.jit(lambda *x: mlstm(*x, segment_ids=ids, implementation=mode)[0])
    output = run(query, key, value, *gates)
    alone, _ = jax.jit(lambda *x: mlstm(*x, implementation=mode))(*(x[:, 12:] for x in (query, key, value, *gates)))
    assert far(output[:, 12:], alone) < 1e-5
    gradients = jax.jit(jax.grad(lambda *x: (run(*x) ** 2).sum(), (0, 1, 2, 3, 4)))(query, key, value, *gates)
    assert all(bool(jnp.isfinite(x).all()) for x in (output, *gradients))


def mlstm_on_shard(tokens, fixed, ids, state, fresh):
    return mlstm(*tokens, state=state, segment_ids=ids)


@pytest.mark.slow
@settings(max_examples=6)
@given(seed=st.integers(0, 99), packed=st.booleans(), strength=st.sampled_from([0.1, 3, 100]))
def test_mlstm_of_shards_equals_one_device(seed, packed, strength):
    """Input gates that open less and more than the initial maximum, and forget gates that keep all or nothing. Products
    of queries and keys are positive: outputs are divided by sums of them, which else cancel, and magnify rounding."""
    query, key, value, _, _ = draw_gated(40, "none", seed=seed)
    gates = strength * np.random.default_rng(seed).normal(size=(2, BATCH, 40, 2)).astype(np.float32)
    tokens = (jnp.abs(query), jnp.abs(key), value, *(jnp.asarray(gate) for gate in gates))
    assert_shards_equal_one_device(mlstm_on_shard, tokens, (), draw_documents(40, seed, packed=packed), 2e-5)
