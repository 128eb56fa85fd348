"""Tokens come back from their experts as from a loop over tokens, in values and gradients, and always the same bits."""

import itertools

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
    order = sort_by_expert(jnp.array([[2, 0], [2, 1], [0, 2]]), 4)
    assert order.group_sizes.tolist() == [2, 1, 3, 0]
    assert order.assignments.tolist() == [1, 4, 3, 0, 2, 5]
    assert order.row_indices.tolist() == [[3, 0], [4, 2], [1, 5]]


@jax.jit
def through(x, weights, chosen, matrices):
    """Each expert multiplies by a number of its own for each feature."""
    order = sort_by_expert(chosen, EXPERTS)
    rows = dispatch(x, order) * jnp.repeat(matrices, order.group_sizes, axis=0, total_repeat_length=TOKENS * TOP)
    return combine(rows, weights, order)


@jax.jit
def one_by_one(x, weights, chosen, matrices):
    return (x[:, None] * matrices[chosen] * weights[..., None]).sum(1)


@given(seed=st.integers(0, 999))
def test_dispatch_and_combine_equal_the_reference(seed):
    x, weights, cotangent = inputs(seed)
    matrices = jax.random.normal(jax.random.key(seed + 1), (EXPERTS, EMBED))
    results = []
    for form in (through, one_by_one):
        y, back = jax.vjp(lambda *arrays, form=form: form(*arrays[:2], choices(seed), arrays[2]), x, weights, matrices)
        results.append((y, *back(cotangent)))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-6)


def test_dispatch_and_combine_do_not_scatter_add():
    """A scatter that adds would add in another order at each run on a GPU. One that writes each place once has none."""

    def run(x, weights):
        order = sort_by_expert(choices(0), EXPERTS)
        return (combine(dispatch(x, order), weights, order) ** 2).sum()

    text = jax.jit(jax.grad(run, (0, 1))).lower(*inputs(0)[:2]).as_text()
    assert "stablehlo.gather" in text
    assert "stablehlo.add" not in "".join(part.split("}")[0] for part in text.split("stablehlo.scatter")[1:])


def test_combine_of_bfloat16_sums_in_float32():
    x = jnp.ones((1, 1), jnp.bfloat16)
    order = sort_by_expert(jnp.arange(3)[None], 3)
    weights = jnp.array([[1.0, 2**-8, 2**-8]])  # one by one, in bfloat16, each would be lost: half a unit, to even
    total = combine(dispatch(x, order), weights, order)
    assert total.dtype == jnp.bfloat16 and float(total[0, 0]) == 1 + 2**-7


def slots_by_hand(chosen, experts, capacity):
    held = [[] for _ in range(experts)]
    taken = np.zeros(chosen.shape, bool)
    for k in range(chosen.shape[1]):
        for token in range(len(chosen)):
            if len(held[chosen[token, k]]) < capacity:
                held[chosen[token, k]].append((token, k))
                taken[token, k] = True
    return held, taken


@given(seed=st.integers(0, 999), capacity=st.sampled_from([1, 4, 40]))
def test_sort_into_slots_fills_first_choices_first(seed, capacity):
    chosen = choices(seed)
    order, taken = sort_into_slots(chosen, EXPERTS, capacity)
    held, expected = slots_by_hand(np.asarray(chosen), EXPERTS, capacity)
    assert (np.asarray(taken) == expected).all()
    visits = [[token * TOP + k for token, k in own] + [TOKENS * TOP] * (capacity - len(own)) for own in held]
    assert order.assignments.tolist() == [*itertools.chain(*visits), TOKENS * TOP]
    places = np.asarray(order.row_indices)
    assert (places[:-1][~expected] == EXPERTS * capacity).all() and (places[-1] == EXPERTS * capacity).all()
    for token, k in zip(*np.nonzero(expected), strict=True):
        assert order.assignments[places[token, k]] == token * TOP + k


@given(seed=st.integers(0, 999), capacity=st.sampled_from([1, 4, 40]))
def test_sort_into_slots_drops_without_gradient(seed, capacity):
    x, weights, cotangent = inputs(seed)
    chosen = choices(seed)

    def slotted(x, weights):
        order, taken = sort_into_slots(chosen, EXPERTS, capacity)
        more = lambda a: jnp.pad(a, ((0, 1), (0, 0)))
        rows = dispatch(more(x), order)
        return combine(rows.at[-1].set(0), more(jnp.where(taken, weights, 0)), order)[:-1]

    def by_hand(x, weights):
        taken = jnp.asarray(slots_by_hand(np.asarray(chosen), EXPERTS, capacity)[1])
        return x * jnp.where(taken, weights, 0).sum(1, keepdims=True)

    results = []
    for form in (slotted, by_hand):
        y, back = jax.vjp(form, x, weights)
        results.append((y, *back(cotangent)))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-6)
