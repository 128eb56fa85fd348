"""Blocks of queries and keys: which pairs are visited."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.ops.attention import AttentionMask
from zoo.ops.attention.blocks import balance_blocks, find_ranges, mark_blocks

SIZES = 4, 3
find_ranges = jax.jit(find_ranges, static_argnums=(0, 1), static_argnames="of_keys")


@pytest.mark.ci
@given(
    causal=st.booleans(),
    window=st.sampled_from([None, 2, 5]),
    block=st.sampled_from([None, 2, 5]),
    ahead=st.booleans(),
    kind=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_pairs_of_blocks_that_the_mask_allows_are_visited(causal, window, block, ahead, kind, seed):
    rng, marks = np.random.default_rng(seed), {}
    block = block if causal and (window or 5) >= (block or 1) else None
    if kind % 2:
        marks |= dict(query_segments=rng.integers(0, 3, (2, 10)), key_segments=rng.integers(0, 3, (2, 10)))
    if kind // 2:
        marks |= dict(query_positions=rng.integers(-3, 20, (2, 10)), key_positions=rng.integers(-9, 20, (2, 10)))
        if causal and ahead:
            marks |= dict(lookahead=rng.integers(0, 6, (2, 10)))
    mask = AttentionMask(causal, window, **{name: jnp.array(x) for name, x in marks.items()}, block=block)
    queries, keys = mark_blocks(mask, 2, (10, 10), SIZES)
    allowed = np.asarray(mask.materialize(10, 10) if mask.materialize(10, 10) is not None else np.ones((2, 10, 10)))
    allowed = np.pad(np.broadcast_to(allowed, (2, 10, 10)), ((0, 0), (0, 2), (0, 2)))
    allowed = allowed.reshape(2, 3, 4, 4, 3).any((2, 4))
    by_query = np.asarray(find_ranges(causal, window, queries, keys))
    by_key = np.asarray(find_ranges(causal, window, queries, keys, of_keys=True))
    for row, query, key in product(range(2), range(3), range(4)):
        if allowed[row, query, key]:
            assert by_query[0, row, query] <= key < by_query[1, row, query]
            assert by_key[0, row, key] <= query < by_key[1, row, key]


@pytest.mark.one_case
@pytest.mark.parametrize(("window", "visited"), [(None, 8), (1, 1), (16, 2), (17, 2), (18, 3), (33, 3), (34, 4)])
def test_blocks_outside_a_causal_window_are_not_visited(window, visited):
    """ceil((window - 1) / block) + 1 blocks of keys per block of queries, whatever the length."""
    marks = mark_blocks(AttentionMask(True, window), 1, (128, 128), (16, 16))
    first, end = find_ranges(True, window, *marks)
    np.testing.assert_array_equal((end - first)[0], np.minimum(np.arange(1, 9), visited))
    first, end = find_ranges(True, window, *marks, of_keys=True)
    np.testing.assert_array_equal((end - first)[0], np.minimum(np.arange(8, 0, -1), visited))


def test_other_segments_and_empty_slots_are_not_visited():
    segments = jnp.arange(128)[None] // 40
    marks = mark_blocks(AttentionMask(True, None, segments, segments), 1, (128, 128), (16, 16))
    assert find_ranges(True, None, *marks)[0][0].tolist() == [0, 0, 0, 2, 2, 5, 5, 5]
    slots = jnp.where(jnp.arange(128) < 50, jnp.arange(128), -1)[None]
    mask = AttentionMask(True, query_positions=jnp.array([[48, 49]]), key_positions=slots)
    first, end = find_ranges(True, None, *mark_blocks(mask, 1, (2, 128), (2, 16)))
    assert (first.tolist(), end.tolist()) == ([[0]], [[4]])
    empty = AttentionMask(True, query_positions=jnp.array([[48, 49]]), key_positions=jnp.full((1, 128), -1))
    first, end = find_ranges(True, None, *mark_blocks(empty, 1, (2, 128), (2, 16)))
    assert (end <= first).all()


@pytest.mark.parametrize(("seq", "size"), [(1, 1), (7, 7), (40, 48), (128, 128), (129, 80), (300, 112), (384, 128)])
def test_balance_blocks_pads_little(seq, size):
    assert balance_blocks(seq, 128) == size
