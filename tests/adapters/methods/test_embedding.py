"""LoRA of an embedding."""

import jax
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters
from zoo.adapters.methods.embedding import EmbeddingLoRA

KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (8, 6), 0, 32)


def test_embedding_lora_equals_its_table():
    """As an embedding, and as a tied head."""
    table = zoo.layers.Embedding(32, 8, key=KEY)
    lora = perturb(EmbeddingLoRA(table, max_rank=3, rank=2, scale=1.5, key=KEY))
    x = jax.random.normal(KEY, (2, 5, 8))
    np.testing.assert_allclose(lora(TOKENS), lora.dense_weight[TOKENS], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lora.transposed(x), x @ lora.dense_weight.T, rtol=1e-5, atol=1e-5)
    assert np.abs(lora.dense_weight - table.dense_weight).max() > 1e-2


@pytest.mark.ci
def test_embedding_lora_updates_a_tied_head():
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, key=KEY)
    model = perturb(adapters.lora(model, targets="embedding", rank=2, key=KEY))
    np.testing.assert_allclose(adapters.merge(model)(TOKENS), model(TOKENS), atol=2e-5)
