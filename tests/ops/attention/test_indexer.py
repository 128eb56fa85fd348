"""Scores of an indexer and their divergence from attention: reference values, bfloat16, and queries without keys."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.parity_ops import distance
from tests.quick import mark_slow
from zoo.ops.attention import AttentionMask
from zoo.ops.attention.indexer import indexer_divergence, score_keys
from zoo.ops.attention.reference import attention_probabilities

MORE = os.environ.get("ZOO_PARITY")


@pytest.mark.skipif(not MORE, reason="ZOO_PARITY names no folder of reference cases")
@pytest.mark.parametrize("variant", mark_slow(["base", "even", "one"], but=["base"]))
def test_divergence_equals_reference_values(variant):
    """In float64: the divergence of each query, and the gradient of every input, 0 for those of attention."""
    arrays = load_file(Path(str(MORE)) / "ops_more" / f"indexer_loss.{variant}.safetensors")
    inputs = {name.removeprefix("in."): jnp.asarray(x) for name, x in arrays.items() if name.startswith("in.")}

    def diverge(inputs):
        probabilities = attention_probabilities(inputs["q"], inputs["k"], AttentionMask(True)).sum(1)
        scores = score_keys(inputs["qi"], inputs["ki"], inputs["w"])
        seq = scores.shape[1]
        return indexer_divergence(probabilities, scores, AttentionMask(True).materialize(seq, seq))

    output, back = jax.vjp(jax.jit(diverge), inputs)
    (gradients,) = back(jnp.asarray(arrays["weight.o"]))
    if variant == "one":
        assert (output == 0).all() and all((x == 0).all() for x in gradients.values())
        return
    assert distance(output, arrays["f64.o"]) <= 5e-6
    largest = max(np.abs(x).max() for name, x in arrays.items() if name.startswith("f64.grad."))
    for name, gradient in gradients.items():
        wanted = arrays[f"f64.grad.{name}"]
        assert np.abs(gradient - wanted).max() <= max(1e-4 * np.abs(wanted).max(), 1e-6 * largest), name
    assert not gradients["q"].any() and not gradients["k"].any()


def draw(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@jax.jit
def run(query, key, weights, attention, mask):
    """Return divergences, and the gradients of their sum."""
    total = lambda inputs: (indexer_divergence(attention, score_keys(*inputs), mask).sum(), score_keys(*inputs))
    divergence = indexer_divergence(attention, score_keys(query, key, weights), mask)
    return divergence, jax.grad(total, has_aux=True)((query, key, weights))[0]


def test_divergence_is_over_the_allowed_keys():
    """A query without keys has 0, keys that are masked change nothing, and equal distributions diverge by 0."""
    inputs = draw(2, 5, 3, 4, seed=0), draw(2, 7, 4, seed=1), draw(2, 5, 3, seed=2)
    attention = jnp.abs(draw(2, 5, 7, seed=3))
    mask = jnp.asarray(np.random.default_rng(4).random((2, 5, 7)) < 0.6).at[0, 2].set(False)
    divergence, gradients = run(*inputs, attention, mask)
    assert divergence[0, 2] == 0 and (divergence >= 0).all()
    assert all(np.isfinite(x).all() for x in gradients)
    scores = np.asarray(score_keys(*inputs), np.float64)
    for row, query in np.ndindex(divergence.shape):
        seen = np.asarray(mask[row, query])
        target = np.asarray(attention, np.float64)[row, query, seen]
        target /= target.sum() if seen.any() else 1
        mine = np.exp(scores[row, query, seen])
        expected = (target * np.log(target / (mine / mine.sum()))).sum()
        np.testing.assert_allclose(divergence[row, query], expected, atol=1e-5)
    same, _ = run(*inputs, jnp.exp(score_keys(*inputs)), mask)
    np.testing.assert_allclose(same, 0, atol=1e-5)


def test_divergence_in_bfloat16_is_near_float32():
    half = [x.astype(jnp.bfloat16) for x in (draw(2, 5, 3, 4, seed=0), draw(2, 7, 4, seed=1), draw(2, 5, 3, seed=2))]
    attention, mask = jnp.abs(draw(2, 5, 7, seed=3)), jnp.ones((1, 5, 7), bool)
    whole = [x.astype(jnp.float32) for x in half]
    for ours, expected in zip(*(jax.tree.leaves(run(*x, attention, mask)) for x in (half, whole)), strict=True):
        assert np.abs(ours.astype(jnp.float32) - expected).max() <= 2e-2 * np.abs(expected).max()
