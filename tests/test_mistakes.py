"""Natural mistakes of a first script: one line says what was expected, what came, and what would do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.models import Transformer

KEY = jax.random.key(0)
TOKENS = np.zeros((8, 4), np.int32)  # a row for each device of the tests
BATCH = {"tokens": TOKENS, "targets": TOKENS}


@pytest.fixture(scope="module")
def model():
    return Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=16, key=KEY)


def loss_of_logits(model, batch):
    return zoo.cross_entropy(jnp.zeros((*batch["tokens"].shape, 32)), batch)


MISTAKES = {
    "logits": (
        lambda model: zoo.cross_entropy(jnp.zeros((2, 4, 32)), BATCH),
        "a Decoder or Encoder of tokens was expected, not an array float32[2, 4, 32]. Pass the model itself, as in "
        "zoo.cross_entropy(model, batch), which computes the logits; of logits, zoo.models.token_losses(logits, "
        "targets) returns the losses",
    ),
    "logits in a program": (
        lambda model: zoo.value_and_grad(loss_of_logits, zoo.make_mesh())(model, BATCH),
        "tokens was expected, not an array float32[1, 4, 32]. Pass the model itself, as in zoo.cross_entropy(model",
    ),
    "logits of log_probs": (
        lambda model: zoo.log_probs(jnp.zeros((2, 4, 32)), BATCH),
        "not an array float32[2, 4, 32]",
    ),
    "a batch for a model": (lambda model: zoo.cross_entropy(BATCH, model), "tokens was expected, not dict"),
    "a function for a model": (
        lambda model: zoo.score(Transformer, TOKENS),
        "was expected, not the function Transformer",
    ),
}


@pytest.mark.parametrize(("mistake", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered(model, mistake, words):
    with pytest.raises((TypeError, ValueError, AttributeError)) as raised:
        mistake(model)
    assert words in str(raised.value) and "\n" not in str(raised.value)
