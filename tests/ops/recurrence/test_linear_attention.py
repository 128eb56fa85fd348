"""Normalized linear attention, and the fixed decays of retention and lightning attention."""

import jax.numpy as jnp

from tests.recurrences import draw_gated, far
from zoo.ops.recurrence import gated_linear
from zoo.ops.recurrence.linear_attention import (
    lightning_attention,
    lightning_slopes,
    normalized_linear_attention,
    retention,
    retention_log_decays,
    simple_gla,
)


def test_normalized_linear_attention_is_an_average():
    query, key, value, _, _ = draw_gated(9, "none")
    output, _ = normalized_linear_attention(jnp.exp(query), jnp.exp(key), jnp.ones_like(value))
    assert far(output, jnp.ones_like(value)) < 1e-6
    assert not normalized_linear_attention(query, 0 * key, value, implementation="recurrent")[0].any()


def test_retention_and_lightning_decays():
    assert far(jnp.exp(retention_log_decays(3)), jnp.array([1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128])) < 1e-6
    assert far(lightning_slopes(4), jnp.array([2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0])) < 1e-6
    assert not lightning_slopes(4, 1).any()
    query, key, value, _, state = draw_gated(7, "none")
    output, _ = retention(query, key, value, log_decay=jnp.zeros(2), scale=1, state=state)
    assert far(output, gated_linear.recurrent_gated_linear(query, key, value, state=state)[0]) < 1e-6


def test_lightning_attention_equals_simple_gla_with_slopes():
    query, key, value, _, state = draw_gated(7, "none")
    slopes = lightning_slopes(2)
    output, last = lightning_attention(query, key, value, slopes, state=state)
    log_decay = jnp.broadcast_to(-slopes, value.shape[:3])
    expected, expected_last = simple_gla(query, key, value, log_decay, scale=1, state=state, implementation="recurrent")
    assert far(output, expected) < 2e-6 and far(last, expected_last) < 2e-6
