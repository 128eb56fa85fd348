"""The choice of an implementation of a recurrence: chunked, recurrent for one token, other names refused."""

import jax.numpy as jnp
import pytest

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
    assert request == RecurrenceRequest(1, 5, jnp.dtype("bfloat16"), 4, 2, 3, 6, "head", has_bonus=True)
    assert RecurrenceRequest.from_heads(query, value, jnp.zeros((1, 5, 4, 3))).decay == "channel"


def test_unknown_name_is_refused():
    x = jnp.zeros((1, 5, 2, 3))
    with pytest.raises(ValueError, match="gated linear attention has no implementation 'quick'"):
        gla(x, x, x, x, implementation="quick")
    with pytest.raises(ValueError, match="gated linear attention has no implementation 'quick'"):
        simple_gla(x, x, x, x[..., 0], implementation="quick")
    assert GATED_LINEAR.kind == "recurrence"
