"""T5's buckets of distances; attention with their biases by its definition, with a cache, and on a mesh in a scan."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.models.hf.families.test_deberta_v2_layers import compare_scan_on_a_mesh
from tests.weights.test_families_on_meshes import FIXTURES
from zoo.layers import TokenInfo
from zoo.layers.attention.relative_bias import RelativeBias, RelativeBiasAttention, compute_bucket_index
from zoo.layers.token_info import token_info
from zoo.models.scoring import unstack_blocks

FOLDER = FIXTURES / "encoders" / "mpnet_masked"
FIRST_DISTANCES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91)
"""The first distance of each bucket, as PyTorch's class computes them with 32 buckets and a maximum of 128."""


def test_buckets_are_those_of_pytorch():
    distances = np.arange(-600, 601)
    buckets = np.asarray(compute_bucket_index(jnp.asarray(distances)[None], buckets=32, max_distance=128))[0]
    wanted = np.searchsorted(FIRST_DISTANCES, np.abs(distances), side="right") - 1
    np.testing.assert_array_equal(buckets, wanted + 16 * (distances > 0))


@pytest.mark.slow
def test_packed_rows_in_a_scan_on_a_mesh_equal_rows_alone():
    compare_scan_on_a_mesh(FOLDER)


def test_causal_buckets_are_those_of_the_past():
    """All buckets are for keys before the query: exact up to half of them, and logarithmic beyond (T5's decoder)."""
    distances = np.arange(-200, 4)
    options = {"buckets": 8, "max_distance": 15, "causal": True}
    index = np.asarray(compute_bucket_index(jnp.asarray(distances)[None], **options))[0]
    back = np.maximum(-distances, 0)
    wanted = [n if n < 4 else min(4 + int(np.log(n / 4) / np.log(15 / 4) * 4), 7) for n in back]
    np.testing.assert_array_equal(index, wanted)


def make_attention(*, causal):
    bias = partial(RelativeBias, 8, 4)
    return RelativeBiasAttention(16, 4, bias, scale=1.0, causal=causal, max_distance=16, key=jax.random.key(0))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_its_definition(causal):
    attention = make_attention(causal=causal)
    x = jax.random.normal(jax.random.key(1), (2, 7, 16))
    mask = np.array([[1] * 7, [1] * 5 + [0] * 2], bool)
    y, _ = attention(x, token_info(jnp.zeros((2, 7), int), mask=jnp.asarray(mask)))
    linears = attention.query, attention.key, attention.value
    query, key, value = (np.asarray(linear(x), np.float64).reshape(2, 7, 4, 4) for linear in linears)
    distances = np.arange(7)[None] - np.arange(7)[:, None]
    index = np.asarray(compute_bucket_index(jnp.asarray(distances), buckets=8, max_distance=16, causal=causal))
    table: Any = attention.relative_bias
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) + np.asarray(table.weight, np.float64)[index].transpose(2, 0, 1)
    allowed = mask[:, None, None] & ((distances <= 0) if causal else True)
    scores = np.where(allowed, scores, -np.inf)
    probabilities = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    mixed = np.einsum("bhqk,bkhd->bqhd", probabilities, value).reshape(2, 7, 16)
    wanted = mixed @ np.asarray(attention.out.dense_weight, np.float64).T
    np.testing.assert_allclose(np.asarray(y)[mask], wanted[mask], atol=1e-5)
    assert np.isfinite(y).all()


def test_a_cache_continues_a_row_with_padding():
    """The second row's tokens are padded on the left; both are read in two pieces."""
    attention = make_attention(causal=True)
    x = jax.random.normal(jax.random.key(1), (2, 6, 16))
    positions = jnp.array([[0, 1, 2, 3, 4, 5], [-1, -1, 0, 1, 2, 3]])
    whole, _ = attention(x, TokenInfo(positions).mask_padding())
    state = attention.init_state(2, 8)
    parts = []
    for part in (slice(0, 3), slice(3, 6)):
        y, state = attention(x[:, part], TokenInfo(positions[:, part]), state)
        parts.append(y)
    joined = np.concatenate(parts, 1)
    real = np.asarray(positions) >= 0
    np.testing.assert_allclose(joined[real], np.asarray(whole)[real], atol=1e-5)
    assert np.isfinite(joined).all()


def test_attention_in_both_directions_has_no_cache():
    with pytest.raises(NotImplementedError, match="a token attends to those after it"):
        make_attention(causal=False).init_state(1, 8)
    with pytest.raises(NotImplementedError, match="a token attends to those after it"):
        unstack_blocks(zoo.load(FOLDER))[0].init_state(1, 8)
