"""The stabilizer against the running maximum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recurrences import BATCH, close, draw_diagonal, with_gradients
from zoo.ops.recurrence.stabilizer import NO_HISTORY, StabilizedMap, StabilizedState, stabilize


def maxima(log_decay, log_input, state, ids):
    """Compute `stabilize` token by token with `jnp.maximum`."""
    rows, previous = [], state
    for t in range(log_input.shape[1]):
        if t:
            previous = jnp.where((ids[:, t] != ids[:, t - 1])[:, None], NO_HISTORY, previous)
        known = previous > NO_HISTORY / 2
        reached = log_decay[:, t] + jnp.where(known, previous, 0)
        highest = jnp.where(known, jnp.maximum(reached, log_input[:, t]), log_input[:, t])
        rows.append((jnp.where(known, reached - highest, 0), log_input[:, t] - highest, highest))
        previous = highest
    return tuple(jnp.stack(column, 1) for column in zip(*rows, strict=True))


@pytest.mark.ci
@settings(max_examples=6)
@given(seed=st.integers(0, 99), segments=st.booleans(), strength=st.sampled_from([0.1, 2, 20]), known=st.booleans())
def test_stabilize_equals_the_running_maximum(seed, segments, strength, known):
    log_decay, log_input, state, ids = draw_diagonal(17, seed, segments=segments, strength=strength)
    state = state if known else jnp.full_like(state, NO_HISTORY)
    ours, theirs = (STABILIZED[f](log_decay, 3 * log_input, state, ids) for f in ("ours", "theirs"))
    close(ours, theirs, 5e-6)
    decay, log_input, _ = ours[0]
    assert (decay <= 1e-5).all() and (log_input <= 0).all()


STABILIZED = {
    "ours": jax.jit(
        lambda g, i, state, ids: with_gradients(lambda g, i, m: stabilize(g, i, state=m, segment_ids=ids), g, i, state)
    ),
    "theirs": jax.jit(lambda g, i, state, ids: with_gradients(lambda g, i, m: maxima(g, i, m, ids), g, i, state)),
}


def test_stabilize_of_several_chunks_without_a_state():
    log_decay, log_input, _, ids = draw_diagonal(150, 2)
    decay, entering, highest = (np.asarray(x) for x in stabilize(log_decay, log_input, segment_ids=ids))
    begins = np.concatenate([np.ones((BATCH, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    for t in range(150):
        reached = np.where(begins[:, t, None], -np.inf, log_decay[:, t] + highest[:, t - 1])
        np.testing.assert_allclose(highest[:, t], np.maximum(reached, log_input[:, t]), rtol=1e-6)
        np.testing.assert_allclose(decay[:, t], np.where(np.isinf(reached), 0, reached - highest[:, t]), atol=1e-6)
    np.testing.assert_array_equal(entering, log_input - highest)


def test_stabilize_of_infinite_inputs_is_finite():
    log_decay, log_input, _, _ = draw_diagonal(7, 3)
    log_input = log_input.at[:, :3].set(-jnp.inf)
    results, gradients = with_gradients(stabilize, log_decay, log_input)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((results, gradients)))
    np.testing.assert_array_equal(results[2][:, 3], log_input[:, 3])


def draw_map(draw):
    """Draw a map whose log factor and maximum are moderate, huge, or those of a new segment or of no tokens."""
    log_factor = -draw.choice([0.0, 1.0, 1e4, np.inf], (BATCH, 5))
    maximum = draw.choice([-300.0, 0.0, 2.0, 1e4, NO_HISTORY], (BATCH, 5))
    sums = np.where(maximum > NO_HISTORY, draw.normal(size=(BATCH, 5)), 0)
    return StabilizedMap(*(jnp.asarray(x, jnp.float32) for x in (log_factor, maximum, sums)))


def visible(log_factor, maximum, sums):
    """Factor, maximum and sums, without infinities."""
    return np.exp(log_factor), np.where(maximum > NO_HISTORY / 2, maximum, 0), sums


@given(seed=st.integers(0, 999))
def test_stabilized_maps_compose_for_factors_of_any_size(seed):
    draw = np.random.default_rng(seed)
    first, second, third = (draw_map(draw) for _ in range(3))
    close(visible(*first.then(second).then(third)), visible(*first.then(second.then(third))))
    state = StabilizedState(*draw_map(draw)[1:])
    close(visible(0.0, *first.then(second).apply(state)), visible(0.0, *second.apply(first.apply(state))))
    reset, kept = (affine_map.apply(state) for affine_map in (first.reset(jnp.asarray([True, False])), first))
    for after, old, offset in zip(reset, kept, first.offset, strict=True):
        np.testing.assert_array_equal(after, jnp.stack([offset[0], old[1]]))
