"""Blocks of packed texts, the choice among them, and selections of keys by group, against loops over texts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.ops.attention import AttentionMask, grouped_query_attention, reference_attention
from zoo.ops.attention.block_selection import (
    average_blocks,
    place_in_blocks,
    place_packed_in_blocks,
    score_probabilities,
    score_products,
    select_blocks,
    select_keys,
    split_into_blocks,
)

BATCH, SEQ, HEADS, KV_HEADS, DIM, SIZE, TOP = 2, 17, 4, 2, 4, 3, 3
TEXTS = st.lists(st.integers(1, 9), min_size=SEQ, max_size=SEQ)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


QUERY = draw(BATCH, SEQ, HEADS, DIM)
KEY, VALUE = (draw(BATCH, SEQ, KV_HEADS, DIM, seed=seed) for seed in (1, 2))


@partial(jax.jit, static_argnames=("shared",))
def select(query, key, segment_ids, *, shared):
    """Return the keys that each query sees, and the scores and means of blocks."""
    places = place_packed_in_blocks(segment_ids, SIZE)
    means = average_blocks(split_into_blocks(key, SIZE, places))
    score = score_probabilities if shared else score_products
    chosen = select_blocks(query, means, TOP, places, score=score)
    mask = AttentionMask(True, None, segment_ids, segment_ids, selected=select_keys(chosen, places.own))
    return mask.materialize(SEQ, SEQ), score(query, means, places), places


def segment(lengths):
    """Return the ids of texts of these lengths, cut to one row, and the slice of each."""
    ends = np.minimum(np.cumsum(lengths), SEQ)
    starts = np.concatenate([[0], ends[:-1]])
    slices = [slice(int(a), int(b)) for a, b in zip(starts, ends, strict=True) if a < b]
    ids = np.concatenate([np.full(part.stop - part.start, i + 1) for i, part in enumerate(slices)])
    return np.broadcast_to(ids, (BATCH, SEQ)), slices


def select_by_loops(query, key, text, shared):
    """Choose for each query of one text by its definition, in float64."""
    query, key = (np.asarray(x, np.float64)[:, text] for x in (query, key))
    seq, group = query.shape[1], HEADS // KV_HEADS
    seen = np.zeros((BATCH, KV_HEADS if shared else HEADS, seq, seq), bool)
    for b, g, t in np.ndindex(seen.shape[:3]):
        n = g if shared else g // group
        whole = (t + 1) // SIZE
        means = key[b, : whole * SIZE, n].reshape(whole, SIZE, DIM).mean(1)
        if shared:
            products = query[b, t, n * group : (n + 1) * group] @ means.T / DIM**0.5
            scores = (np.exp(products) / np.exp(products).sum(-1, keepdims=True)).sum(0)
        else:
            scores = means @ query[b, t, g]
        own = t // SIZE
        best = np.argsort(-scores[:own], kind="stable")[: TOP - 1]
        for block in (*best, own):
            seen[b, g, t, block * SIZE : min((block + 1) * SIZE, t + 1)] = True
    return seen


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.ci)])
@given(lengths=TEXTS)
def test_packed_texts_choose_as_loops_over_texts(shared, lengths):
    ids, texts = segment(lengths)
    seen, _, places = select(QUERY, KEY, jnp.asarray(ids), shared=shared)
    assert places.own.max() < -(-SEQ // SIZE)
    expected = np.zeros(seen.shape, bool)
    for text in texts:
        expected[:, :, text, text] = select_by_loops(QUERY, KEY, text, shared)
    np.testing.assert_array_equal(seen, expected)


def find_margins(scores, places):
    """Return the gap between the last score that is chosen and the first that is not, for each choice."""
    earlier = np.arange(scores.shape[-1]) < np.asarray(places.own)[:, None, :, None]
    ranked = -np.sort(-np.where(earlier, scores, -1e9), axis=-1)
    return np.where(earlier.sum(-1) >= TOP, ranked[..., TOP - 2] - ranked[..., TOP - 1], np.inf)


@given(seed=st.integers(0, 99))
def test_choice_in_bfloat16_is_equal_beyond_the_margin(seed):
    ids = jnp.ones((BATCH, SEQ), jnp.int32)
    query, key = (draw(*x.shape, seed=seed + i).astype(jnp.bfloat16) for i, x in enumerate((QUERY, KEY)))
    half, _, _ = select(query, key, ids, shared=False)
    whole, scores, places = select(query.astype(jnp.float32), key.astype(jnp.float32), ids, shared=False)
    is_clear = find_margins(np.asarray(scores), places) > 0.05
    assert is_clear.mean() > 0.8
    np.testing.assert_array_equal(np.asarray(half)[is_clear], np.asarray(whole)[is_clear])


def test_ties_choose_the_earlier_block():
    places = place_in_blocks(jnp.arange(12)[None], 2)
    chosen = select_blocks(jnp.ones((1, 12, 1, 2)), jnp.ones((1, 6, 1, 2)), 3, places)[0, 0]
    assert chosen[11].tolist() == [True, True, False, False, False, True]
    assert chosen[0].tolist() == [True] + [False] * 5
    only_own = select_blocks(jnp.ones((1, 12, 1, 2)), jnp.ones((1, 6, 1, 2)), 1, places)[0, 0]
    np.testing.assert_array_equal(only_own, np.repeat(np.eye(6, dtype=bool), 2, axis=0))
    padding = place_in_blocks(jnp.array([[-1, 0, 1]]), 2)
    assert padding.own.tolist() == [[-1, 0, 0]] and padding.is_last.tolist() == [[False, False, True]]


def test_choice_has_no_gradient():
    places = place_in_blocks(jnp.arange(12)[None], 2)
    query, key = draw(1, 12, 2, 4), draw(1, 6, 2, 4, seed=1)

    def count(score, inputs):
        return jnp.where(select_blocks(*inputs, 2, places, score=score), inputs[0].sum(), 0).sum()

    for score in (score_products, score_probabilities):
        by_query, by_key = jax.grad(partial(count, score))((query, key))
        chosen = select_blocks(query, key, 2, places, score=score).sum()
        assert (by_key == 0).all() and (by_query == chosen).all()


@pytest.mark.parametrize("groups", [HEADS, KV_HEADS, 1])
def test_selections_by_group_equal_repeated_masks(groups):
    """Outputs and gradients of both implementations equal attention of each query head with its own mask."""
    selected = jnp.asarray(np.random.default_rng(3).random((BATCH, groups, SEQ, SEQ)) < 0.4)

    def attend(function, inputs):
        mask = AttentionMask(True, None, selected=selected)
        return function(*inputs, mask)

    def attend_by_head(inputs):
        query, key, value = inputs
        outputs = []
        for head in range(HEADS):
            mask = AttentionMask(True, None, selected=selected[:, head * groups // HEADS])
            n = head * KV_HEADS // HEADS
            outputs.append(reference_attention(query[:, :, [head]], key[:, :, [n]], value[:, :, [n]], mask))
        return jnp.concatenate(outputs, axis=2)

    @jax.jit
    def run(inputs, weights):
        functions = partial(attend, grouped_query_attention), partial(attend, reference_attention), attend_by_head
        results = []
        for function in functions:
            output, back = jax.vjp(function, inputs)
            results.append((output, back(weights)))
        return results

    grouped, reference, expected = run((QUERY, KEY, VALUE), draw(*QUERY.shape, seed=9))
    for result in (grouped, reference):
        for ours, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, wanted, atol=2e-6)


def test_groups_that_do_not_share_out_are_refused():
    mask = AttentionMask(True, None, selected=jnp.ones((BATCH, 3, SEQ, SEQ), bool))
    with pytest.raises(ValueError, match="4 query heads do not divide evenly over 3 groups with own selections"):
        grouped_query_attention(QUERY, KEY, VALUE, mask)
