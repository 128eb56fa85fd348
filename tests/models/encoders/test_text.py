"""Encoders of texts: packed rows and padding on the left equal rows of their own, and natural mistakes are named."""

from functools import partial
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.quick import mark_slow
from zoo.models import classification_loss

FIXTURES = Path(__file__).parents[2] / "fixtures" / "encoders"
TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 40, (2, 9)))


PACKED = ["bert_masked", "modernbert_masked", "mpnet_masked", "electra_masked", "electra_replaced"]
PACKED += ["xlm_roberta_xl_masked", "albert_groups"]


@pytest.mark.parametrize("name", mark_slow(PACKED, but=["modernbert_masked", "mpnet_masked"]))
def test_packed_texts_equal_rows_of_their_own(name):
    @eqx.filter_jit
    def run(model):
        packed = model(TOKENS.reshape(1, 18), segment_ids=jnp.repeat(jnp.array([[1, 2]]), 9, axis=1))
        padded = jnp.pad(TOKENS, [(0, 0), (3, 0)])
        return model(TOKENS), packed, model(padded, mask=jnp.arange(12)[None].repeat(2, 0) >= 3)

    alone, packed, padded = run(zoo.load(FIXTURES / name))
    np.testing.assert_allclose(packed.reshape(alone.shape), alone, atol=2e-5)
    np.testing.assert_allclose(padded[:, 3:], alone, atol=2e-5)


TEXTS = ["bert_texts", "roberta_texts", "modernbert_texts", "eurobert_texts", "mpnet_texts", "electra_texts"]
TEXTS += ["xlm_roberta_xl_texts", "albert_texts"]


@pytest.mark.ci
@pytest.mark.parametrize("name", mark_slow(TEXTS, but=["roberta_texts"]))
def test_padding_of_classified_texts_changes_nothing(name):
    model = zoo.load(FIXTURES / name)
    for widths in ((3, 0), (0, 3)):
        mask = jnp.pad(jnp.ones((2, 9), bool), [(0, 0), widths])
        np.testing.assert_allclose(model(jnp.pad(TOKENS, [(0, 0), widths]), mask=mask), model(TOKENS), atol=2e-5)


def test_loss_of_replaced_tokens_is_binary_cross_entropy():
    model = zoo.load(FIXTURES / "electra_replaced")
    labels = jnp.asarray(np.random.default_rng(1).integers(-1, 2, TOKENS.shape))
    total, count = classification_loss(model, {"tokens": TOKENS, "labels": labels})
    logits = np.asarray(model(TOKENS), np.float64)
    assert logits.shape == TOKENS.shape
    chances = 1 / (1 + np.exp(np.where(labels == 1, -logits, logits)))
    np.testing.assert_allclose(total, -np.log(chances)[labels >= 0].sum(), rtol=1e-5)
    assert count == (labels >= 0).sum()


def test_encoder_refuses_natural_mistakes():
    masked, texts, features = (zoo.load(FIXTURES / name) for name in ("bert_masked", "bert_texts", "bert_features"))
    roberta, labels = zoo.load(FIXTURES / "eurobert_masked"), jnp.zeros(2, int)
    batch = {"tokens": TOKENS, "labels": labels}
    mistakes = {
        "makes one vector of a row": partial(texts, TOKENS, segment_ids=jnp.ones((2, 9), int)),
        "the model embeds no types": partial(roberta, TOKENS, token_types=jnp.zeros((2, 9), int)),
        "30 tokens are too many": partial(masked, jnp.ones((1, 30), int)),
        "it has no KV cache": partial(masked.init_state, 1, 8),
        "are MaskedLMHead's": partial(zoo.cross_entropy, texts, {"tokens": TOKENS, "targets": TOKENS}),
        "cross_entropy trains": partial(classification_loss, masked, batch),
        "needs a ClassificationHead": partial(classification_loss, features, batch),
        "the batch has no labels": partial(classification_loss, texts, {"tokens": TOKENS}),
        "the batch has weights, which nothing reads": partial(classification_loss, texts, {**batch, "weights": labels}),
    }
    for message, mistake in mistakes.items():
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
            mistake()
