"""Top-k routing against each rule in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.ops.moe.routing import biased_top_k, is_in_top_groups, softmax_top_k, sparse_mixer, top_k_softmax

EXPERTS = 8


def softmax(x):
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def largest(scores, top):
    """Return the indices of the largest; ties go to the first."""
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:top]


def best_groups(scores, groups, kept, counted):
    own = np.split(np.asarray(scores), groups)
    selected = largest([sum(sorted(g)[-counted:]) for g in own], kept)
    return [e for e in range(len(scores)) if e // (len(scores) // groups) in selected]


LOGITS = st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0]), min_size=EXPERTS, max_size=EXPERTS)
"""Few values, so that ties are common."""


@given(LOGITS, st.sampled_from([1, 3, EXPERTS]), st.booleans())
def test_softmax_top_k_equals_its_formula(logits, top, renormalize):
    weights, selected = softmax_top_k(jnp.array([logits]), top, renormalize=renormalize, scale=2)
    scores = softmax(np.array(logits))
    assert selected[0].tolist() == largest(logits, top)
    expected = scores[selected[0]] / (scores[selected[0]].sum() if renormalize else 1)
    np.testing.assert_allclose(weights[0], 2 * expected, rtol=1e-6)


@given(LOGITS, st.sampled_from([1, 3, EXPERTS]))
def test_top_k_softmax_equals_renormalized_softmax_top_k(logits, top):
    ours, selected = top_k_softmax(jnp.array([logits]), top)
    other, same = softmax_top_k(jnp.array([logits]), top, renormalize=True)
    assert selected.tolist() == same.tolist()
    np.testing.assert_allclose(ours, other, rtol=1e-6)


@given(LOGITS, st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]))
def test_softmax_top_k_limits_to_the_best_groups(logits, groups):
    weights, selected = softmax_top_k(jnp.array([logits]), 2, groups=groups[0], kept_groups=groups[1])
    allowed = best_groups(softmax(np.float32(logits)), *groups, 1)
    expected = [allowed[i] for i in largest([logits[e] for e in allowed], 2)]
    assert selected[0].tolist() == expected
    np.testing.assert_allclose(weights[0], softmax(np.array(logits))[expected], rtol=1e-6)


@given(LOGITS, LOGITS, st.sampled_from([(1, 1), (2, 1), (4, 2)]), st.booleans())
def test_biased_top_k_selects_by_bias_and_weights_without(logits, bias, groups, renormalize):
    scores, bias = np.float32(jax.nn.sigmoid(jnp.array(logits))), np.float32(bias)
    options = {"groups": groups[0], "kept_groups": groups[1], "renormalize": renormalize, "scale": 2.5}
    weights, selected = biased_top_k(jnp.array([scores]), jnp.array(bias), 2, **options)
    allowed = best_groups(scores + bias, *groups, 2)
    expected = [allowed[i] for i in largest([(scores + bias)[e] for e in allowed], 2)]
    assert selected[0].tolist() == expected
    total = scores[expected].sum() if renormalize else 1
    np.testing.assert_allclose(weights[0], 2.5 * scores[expected] / total, rtol=1e-5)


def test_biased_top_k_gradients_flow_through_weights_alone():
    scores, bias = jnp.array([[0.2, 0.7, 0.6]]), jnp.array([0.0, 0.0, 0.5])
    to_scores, to_bias = jax.grad(lambda *x: biased_top_k(*x, 1, renormalize=False)[0].sum(), (0, 1))(scores, bias)
    assert to_scores.tolist() == [[0, 0, 1]] and to_bias.tolist() == [0, 0, 0]


@given(LOGITS, st.sampled_from([0.0, 0.2, 0.6]))
def test_sparse_mixer_weights_each_by_the_experts_near_it(logits, jitter):
    weights, selected = sparse_mixer(jnp.array([logits]), jitter)
    assert selected[0].tolist() == largest(logits, 2)
    for weight, best, left in zip(weights[0], selected[0], ([], [int(selected[0, 0])]), strict=True):
        others = [e for e in range(EXPERTS) if e not in left]
        is_near = lambda e, m=logits[best]: m - logits[e] <= 2 * jitter * max(abs(logits[e]), m)
        near = [e for e in others if is_near(e)]
        expected = np.exp(logits[best]) / np.exp([logits[e] for e in near]).sum()
        np.testing.assert_allclose(weight, expected, rtol=1e-5)


def test_is_in_top_groups_of_all_groups_is_true():
    assert is_in_top_groups(jnp.zeros((3, 6)), 3, 3, experts_per_group_score=1).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_routing_weights_are_float32(dtype):
    logits = jnp.ones((2, 4), dtype)
    assert softmax_top_k(logits, 2)[0].dtype == top_k_softmax(logits, 2)[0].dtype == jnp.float32
