"""LoRA of an embedding."""

import jax
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters

KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (8, 6), 0, 32)


@pytest.mark.ci
def test_embedding_lora_updates_a_tied_head():
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, key=KEY)
    model = perturb(adapters.lora(model, targets="embedding", rank=2, key=KEY))
    np.testing.assert_allclose(adapters.merge(model)(TOKENS), model(TOKENS), atol=2e-5)
