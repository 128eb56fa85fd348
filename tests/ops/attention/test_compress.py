"""Compressed keys of blocks equal a loop over features and tokens, and attention to two sets of keys equals attention
to all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.ops.attention import AttentionMask
from zoo.ops.attention.compress import compress_blocks
from zoo.ops.attention.reference import reference_attention
from zoo.ops.attention.select import attention_with_lse, merge_attention

BLOCKS, SIZE, FEATURES = 4, 3, 5


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def average(values, gates):
    """Return the sum of vectors weighted by exp(gates), divided by the sum of the weights, for each feature."""
    weights = np.exp(np.float64(gates))
    return (weights * values).sum(0) / weights.sum(0)


@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_equal_the_definition(overlap):
    """With gradients, and blocks that begin a text: they have no block before."""
    channels = FEATURES * (1 + overlap)
    values, gates = (draw(2, BLOCKS, SIZE, channels, seed=seed) for seed in (1, 2))
    places = draw(SIZE, channels, seed=3)
    follows = np.array([[False, True, True, True], [False, True, False, True]])
    made = jax.jit(compress_blocks)(values, gates, places, follows if overlap else None)
    for row, block in np.ndindex(2, BLOCKS):
        own_values = values[row, block, :, -FEATURES:]
        own_gates = (gates[row, block] + places)[:, -FEATURES:]
        if overlap and follows[row, block]:
            own_values = np.concatenate([values[row, block - 1, :, :FEATURES], own_values])
            own_gates = np.concatenate([(gates[row, block - 1] + places)[:, :FEATURES], own_gates])
        np.testing.assert_allclose(made[row, block], average(own_values, own_gates), rtol=2e-5, atol=1e-6)


def test_no_gradient_crosses_a_text():
    values, gates, places = draw(1, 2, SIZE, 2), draw(1, 2, SIZE, 2, seed=1), draw(SIZE, 2, seed=2)

    def second(values, gates, follows):
        return compress_blocks(values, gates, places, follows)[:, 1].sum()

    grads = jax.jit(jax.grad(second, (0, 1)))
    for x in grads(values, gates, jnp.array([[False, False]])):
        assert not x[:, 0].any() and np.isfinite(x).all()
    assert all(x[:, 0, :, :1].all() for x in grads(values, gates, jnp.array([[False, True]])))


def test_merged_attention_equals_attention_to_all_keys():
    query, key, value = draw(2, 6, 4, 8), draw(2, 6, 1, 8, seed=1), draw(2, 6, 1, 8, seed=2)
    sinks = draw(4, seed=3)
    is_first = jnp.arange(6) < 2

    def merge(query, key, value, sinks):
        masks = (AttentionMask(True, selected=jnp.broadcast_to(x, (2, 6, 6))) for x in (is_first, ~is_first))
        return merge_attention([attention_with_lse(query, key, value, mask) for mask in masks], sinks)

    def attend(query, key, value, sinks):
        return reference_attention(query, key, value, AttentionMask(True), sinks=sinks)

    weight = draw(2, 6, 4, 8, seed=4)

    def differentiate(run):
        total = lambda *inputs: (run(*inputs) * weight).sum()
        return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(query, key, value, sinks)

    for ours, wanted in zip(*map(jax.tree.leaves, (differentiate(merge), differentiate(attend))), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)
