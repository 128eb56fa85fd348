"""Sums of log decays: differences as exact as float32 is, in the channels of bfloat16 keys too, and their gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.ops.attention.decays import (
    DECAY_CHANNELS,
    add_decay_sums,
    append_decay_gradient,
    append_decay_sums,
    split_decay_sums,
    subtract_decay_sums,
    sum_log_decays,
)

SEQ, CUT = 1000, 333
sum_log_decays = jax.jit(sum_log_decays)


@jax.jit
def subtract_in_pieces(log_decay):
    """Return the differences of 50 late tokens and all, of sums continued at CUT and held by bfloat16 channels."""
    first, second = sum_log_decays(log_decay[:, :CUT]), sum_log_decays(log_decay[:, CUT:])
    sums = jnp.concatenate([first, add_decay_sums(first[:, -1:], second)], axis=1)
    held = append_decay_sums(jnp.zeros((*log_decay.shape, 3), jnp.bfloat16), sums)
    sums = split_decay_sums(held)[1].swapaxes(1, 2)
    return subtract_decay_sums(sums[:, :, -50:], sums)


@given(seed=st.integers(0, 99), strength=st.sampled_from([1e-3, 1.0, 100.0]), spread=st.sampled_from([0.1, 3.0]))
def test_differences_are_exact_to_their_own_last_digits(seed, strength, spread):
    """Sums reach -100,000, where float32 has steps of 0.008, and tokens with small decays follow ones with large."""
    draw = np.random.default_rng(seed)
    log_decay = np.float32(-strength * np.exp(spread * draw.normal(size=(1, SEQ, 2))))
    sums = np.float64(log_decay).cumsum(1).swapaxes(1, 2)
    expected = sums[:, :, -50:, None] - sums[:, :, None]
    error = np.abs(np.float64(subtract_in_pieces(log_decay)) - expected)
    assert (error <= 3e-7 * np.abs(expected) + 2.0**-36 * np.abs(sums).max()).all()


def test_gradient_of_sums_flows_through_the_channels():
    """The gradient of a difference is 1 at the tokens between."""

    def pick(log_decay, query, key):
        held = append_decay_sums(jnp.zeros((1, 8, 1, 2)), sum_log_decays(log_decay))
        sums = split_decay_sums(held)[1].swapaxes(1, 2)
        return subtract_decay_sums(sums, sums)[0, 0, query, key]

    log_decay = -jnp.arange(1.0, 9).reshape(1, 8, 1)
    value, gradient = jax.value_and_grad(pick)(log_decay, 6, 2)
    assert value == -(4 + 5 + 6 + 7)
    np.testing.assert_array_equal(gradient[0, :, 0], [0, 0, 0, 1, 1, 1, 1, 0])


def test_append_decay_gradient_is_the_transpose_of_the_split():
    x = jnp.arange(24.0).reshape(1, 2, 1, 12)
    cotangents = jnp.ones((1, 2, 1, 12 - DECAY_CHANNELS)), 3 * jnp.ones((1, 2, 1, 2))
    (expected,) = jax.vjp(split_decay_sums, x)[1](cotangents)
    np.testing.assert_array_equal(append_decay_gradient(cotangents[0], cotangents[1][..., :1]), expected)
    assert append_decay_gradient(x, None) is x


def test_float16_is_refused():
    with pytest.raises(ValueError, match="range of bfloat16, which float16 does not have: use float32 or bfloat16"):
        append_decay_sums(jnp.zeros((1, 2, 1, 4), jnp.float16), jnp.zeros((1, 2, 1, 2)))
