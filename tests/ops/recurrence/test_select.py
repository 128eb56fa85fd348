"""The choice of an implementation of a recurrence: chunked, recurrent for one token, other names refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.layers.recurrent.common import l2_normalize
from zoo.ops.platform import target_platform
from zoo.ops.recurrence.delta_rule import DELTA_RULE, gated_delta_rule
from zoo.ops.recurrence.gated_linear import GATED_LINEAR
from zoo.ops.recurrence.linear_attention import gla, simple_gla
from zoo.ops.recurrence.mamba import SELECTIVE_SCAN
from zoo.ops.recurrence.select import RecurrenceRequest


def test_auto_takes_chunks_and_for_one_token_a_step():
    choose = lambda seq: SELECTIVE_SCAN.select("auto", RecurrenceRequest(batch=2, seq=seq, dtype=jnp.float32)).name
    assert (choose(1), choose(2), choose(4096)) == ("recurrent", "chunked", "chunked")


def test_request_describes_the_arrays():
    query, value = jnp.zeros((1, 5, 2, 3)), jnp.zeros((1, 5, 4, 6), jnp.bfloat16)
    request = RecurrenceRequest.from_heads(query, value, jnp.zeros((1, 5, 4)), has_bonus=True)
    assert request == RecurrenceRequest(1, 5, jnp.dtype("float32"), 4, 2, 3, 6, "head", has_bonus=True)
    assert RecurrenceRequest.from_heads(query, value, jnp.zeros((1, 5, 4, 3))).decay == "channel"


def test_unknown_name_is_refused():
    x = jnp.zeros((1, 5, 2, 3))
    with pytest.raises(ValueError, match="gated linear attention has no implementation 'quick'"):
        gla(x, x, x, x, implementation="quick")
    with pytest.raises(ValueError, match="gated linear attention has no implementation 'quick'"):
        simple_gla(x, x, x, x[..., 0], implementation="quick")
    assert GATED_LINEAR.kind == "recurrence"


def test_shard_of_a_sequence_is_computed_in_chunks():
    """Even a single token; what scans from a known state raises by name."""
    x = jnp.ones((1, 1, 2, 3))
    find_state = lambda affine_map: affine_map.offset
    request = RecurrenceRequest.from_heads(x, x, None, state=find_state)
    assert GATED_LINEAR.select("auto", request).name == DELTA_RULE.select("auto", request).name == "chunked"
    for name in ("recurrent", "pallas"):
        with pytest.raises(ValueError, match=f"'{name}' cannot compute this, because the sequence is sharded"):
            gla(x, x, x, -x, state=find_state, implementation=name)


def test_pallas_is_opt_in():
    request = RecurrenceRequest(batch=1, seq=128, dtype=jnp.bfloat16, heads=2, groups=2, key_dim=64, value_dim=64)
    for operation in (DELTA_RULE, GATED_LINEAR):
        choices = {choice.name: choice for choice in operation.explain(request)}
        assert choices["chunked"].is_chosen and choices["pallas"].is_possible
        assert "not been measured on a TPU" in str(choices["pallas"].reason)
        assert operation.select("pallas", request).name == "pallas"
    with (
        target_platform("gpu"),
        pytest.raises(ValueError, match="'pallas' cannot compute this"),
    ):
        DELTA_RULE.select("pallas", request)


@pytest.mark.slow
def test_pallas_kernels_equal_chunks_behind_the_door():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 20, 1, 8))
    log_decay, beta = -jnp.ones((1, 20, 1)), jnp.full((1, 20, 1), 0.5)
    run = lambda name: gated_delta_rule(query, l2_normalize(key), value, beta, log_decay, implementation=name)
    for ours, theirs in zip(run("pallas"), run("chunked"), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
