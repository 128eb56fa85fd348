"""Whisper: convolutions by their definition, transcription of a batch, and features of other shapes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers.encoders.frames import AudioEmbedding, FrameConvolution
from zoo.models.encoders.audio import AudioEncoder

FOLDER = Path(__file__).parents[2] / "fixtures" / "encoder_decoders" / "whisper_base"
KEY = jax.random.key(0)


@pytest.mark.parametrize("stride", [1, 2])
def test_convolution_is_its_definition(stride):
    convolution = FrameConvolution(3, 4, 3, stride=stride, key=KEY)
    x = jax.random.normal(jax.random.key(1), (2, 6, 3))
    padded = np.pad(np.asarray(x, np.float64), [(0, 0), (1, 1), (0, 0)])
    weight = np.asarray(convolution.weight, np.float64)
    frames = [np.einsum("bkc,eck->be", padded[:, start : start + 3], weight) for start in range(0, 6, stride)]
    np.testing.assert_allclose(convolution(x), np.stack(frames, 1), atol=1e-5)


def test_sinusoids_are_sines_then_cosines():
    positions = np.asarray(AudioEmbedding(5, 8, 6, key=KEY).positions, np.float64)
    frequencies = 10_000.0 ** (-np.arange(4) / 3)
    angles = np.arange(6)[:, None] * frequencies
    np.testing.assert_allclose(positions, np.concatenate([np.sin(angles), np.cos(angles)], 1), atol=1e-6)


def test_features_of_another_shape_are_refused():
    model = zoo.load(FOLDER)
    assert isinstance(model.encoder, AudioEncoder) and model.source_key == "features"
    features = jnp.zeros((2, 10, 32))
    tokens = jnp.full((2, 3), 70)
    assert model(features, tokens).shape == (2, 3, 73)
    for wrong in (features[:, :, :30], features[:, :8], features[:, :, 0]):
        with pytest.raises(ValueError, match="10 bands and 32 frames, the whole window"):
            model(wrong, tokens)
    with pytest.raises(TypeError, match="expected log-mel features, got"):
        zoo.generate(model, tokens, max_new_tokens=2)
    with pytest.raises(ValueError, match="mask: a window of audio is read as a whole"):
        model(features, tokens, mask=jnp.ones((2, 32), bool))
    with pytest.raises(ValueError, match="the batch has no features, only source"):
        zoo.cross_entropy(model, {"source": tokens, "tokens": tokens, "targets": tokens})


def test_rows_of_a_batch_are_transcribed_alone():
    model = zoo.load(FOLDER)
    features = jax.random.normal(KEY, (3, 10, 32))
    together = zoo.generate(model, features, max_new_tokens=5)
    for row in range(3):
        alone = zoo.generate(model, features[row : row + 1], max_new_tokens=5)
        np.testing.assert_array_equal(together[row], alone[0])
