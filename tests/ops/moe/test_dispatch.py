"""Dispatch and combine equal the sum over each token's experts, in values and gradients, deterministically."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zoo.ops.moe.dispatch import combine, dispatch, sort_by_expert, sort_into_slots

TOKENS, TOP, EXPERTS, EMBED = 9, 3, 4, 5


def choices(seed, tokens=TOKENS, top=TOP, experts=EXPERTS):
    draw = np.random.default_rng(seed)
    return jnp.asarray(np.stack([draw.permutation(experts)[:top] for _ in range(tokens)]))


def inputs(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    x, cotangent = (jax.random.normal(key, (TOKENS, EMBED)) for key in keys[:2])
    return x, jax.random.uniform(keys[2], (TOKENS, TOP)), cotangent


def test_sort_by_expert_indices():
    indices = sort_by_expert(jnp.array([[2, 0], [2, 1], [0, 2]]), 4)
    assert indices.group_sizes.tolist() == [2, 1, 3, 0]
    assert indices.assignments.tolist() == [1, 4, 3, 0, 2, 5]
    assert indices.row_indices.tolist() == [[3, 0], [4, 2], [1, 5]]


@jax.jit
def dispatch_and_combine(x, weights, selected, matrices):
    """Dispatch, multiply by one scale per expert and feature, and combine."""
    indices = sort_by_expert(selected, EXPERTS)
    rows = dispatch(x, indices) * jnp.repeat(matrices, indices.group_sizes, axis=0, total_repeat_length=TOKENS * TOP)
    return combine(rows, weights, indices)


@jax.jit
def reference(x, weights, selected, matrices):
    return (x[:, None] * matrices[selected] * weights[..., None]).sum(1)


@given(seed=st.integers(0, 999))
def test_dispatch_and_combine_equal_the_reference(seed):
    x, weights, cotangent = inputs(seed)
    matrices = jax.random.normal(jax.random.key(seed + 1), (EXPERTS, EMBED))
    results = []
    for run in (dispatch_and_combine, reference):
        y, back = jax.vjp(lambda *arrays, run=run: run(*arrays[:2], choices(seed), arrays[2]), x, weights, matrices)
        results.append((y, *back(cotangent)))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-6)


def test_dispatch_and_combine_do_not_scatter_add():
    """Scatter-adds are not deterministic on a GPU. Scatters that write each element once are."""

    def loss(x, weights):
        indices = sort_by_expert(choices(0), EXPERTS)
        return (combine(dispatch(x, indices), weights, indices) ** 2).sum()

    text = jax.jit(jax.grad(loss, (0, 1))).lower(*inputs(0)[:2]).as_text()
    assert "stablehlo.gather" in text
    assert "stablehlo.add" not in "".join(part.split("}")[0] for part in text.split("stablehlo.scatter")[1:])


def test_combine_of_bfloat16_sums_in_float32():
    x = jnp.ones((1, 1), jnp.bfloat16)
    indices = sort_by_expert(jnp.arange(3)[None], 3)
    weights = jnp.array([[1.0, 2**-8, 2**-8]])  # in bfloat16 each addition would round to even, and be lost
    total = combine(dispatch(x, indices), weights, indices)
    assert total.dtype == jnp.bfloat16 and float(total[0, 0]) == 1 + 2**-7


def slots_by_hand(selected, experts, capacity):
    slots = [[] for _ in range(experts)]
    has_slot = np.zeros(selected.shape, bool)
    for k in range(selected.shape[1]):
        for token in range(len(selected)):
            if len(slots[selected[token, k]]) < capacity:
                slots[selected[token, k]].append((token, k))
                has_slot[token, k] = True
    return slots, has_slot


@given(seed=st.integers(0, 999), capacity=st.sampled_from([1, 4, 40]))
def test_sort_into_slots_fills_first_choices_first(seed, capacity):
    selected = choices(seed)
    indices, has_slot = sort_into_slots(selected, EXPERTS, capacity)
    slots, expected = slots_by_hand(np.asarray(selected), EXPERTS, capacity)
    assert (np.asarray(has_slot) == expected).all()
    assignments = [[token * TOP + k for token, k in own] + [TOKENS * TOP] * (capacity - len(own)) for own in slots]
    assert indices.assignments.tolist() == [*itertools.chain(*assignments), TOKENS * TOP]
    row_indices = np.asarray(indices.row_indices)
    assert (row_indices[:-1][~expected] == EXPERTS * capacity).all() and (row_indices[-1] == EXPERTS * capacity).all()
    for token, k in zip(*np.nonzero(expected), strict=True):
        assert indices.assignments[row_indices[token, k]] == token * TOP + k


@given(seed=st.integers(0, 999), capacity=st.sampled_from([1, 4, 40]))
def test_sort_into_slots_drops_without_gradient(seed, capacity):
    x, weights, cotangent = inputs(seed)
    selected = choices(seed)
    given_slot = slots_by_hand(np.asarray(selected), EXPERTS, capacity)[1]
    ours = slotted_with_gradients(capacity, selected, x, weights, cotangent)
    theirs = by_hand_with_gradients(jnp.asarray(given_slot), x, weights, cotangent)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, atol=5e-6)


@partial(jax.jit, static_argnums=0)
def slotted_with_gradients(capacity, selected, x, weights, cotangent):
    def slotted(x, weights):
        indices, has_slot = sort_into_slots(selected, EXPERTS, capacity)
        more = lambda a: jnp.pad(a, ((0, 1), (0, 0)))
        rows = dispatch(more(x), indices)
        return combine(rows.at[-1].set(0), more(jnp.where(has_slot, weights, 0)), indices)[:-1]

    y, back = jax.vjp(slotted, x, weights)
    return y, *back(cotangent)


@jax.jit
def by_hand_with_gradients(has_slot, x, weights, cotangent):
    y, back = jax.vjp(lambda x, weights: x * jnp.where(has_slot, weights, 0).sum(1, keepdims=True), x, weights)
    return y, *back(cotangent)
