"""Functions of texts take images with them: hidden states, embeddings, probabilities and captured values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.models.hf.test_image_text import FIXTURES, read_case, read_images

NAMES = ("gemma3_image", "llava_clip")


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    folder = FIXTURES / request.param
    expected = read_case(folder)
    images = read_images(folder, expected)
    return zoo.load(folder), {name: jnp.asarray(x) for name, x in expected.items()}, images


def test_hidden_states_of_texts_with_images_match_pytorch(case):
    model, expected, images = case
    states = zoo.hidden_states(model, expected["input_ids"], images=images)
    wanted = [expected[name] for name in sorted(expected) if name.startswith("hidden_states.")]
    assert len(wanted) == len(states) > 2
    for ours, theirs in zip(states, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())


def test_embeddings_pool_the_hidden_states_of_all_tokens(case):
    model, expected, images = case
    tokens = expected["input_ids"]
    last = np.asarray(zoo.hidden_states(model, tokens, images=images)[-1])
    np.testing.assert_allclose(zoo.embed(model, tokens, images=images, pooling="mean"), last.mean(1), atol=1e-5)
    padded = expected["padleft.input_ids"]
    mask = expected["padleft.attention_mask"] > 0
    vectors = zoo.embed(model, padded, mask, images=images, pooling="lasttoken")
    for row, count in enumerate(mask.sum(1)):
        np.testing.assert_allclose(vectors[row], last[row, count - 1], atol=1e-4)
    other = zoo.embed(model, tokens, images=images * 2, pooling="mean")
    assert np.abs(np.asarray(other) - last.mean(1))[0].max() > 1e-3, "the images count"


def test_probabilities_of_texts_with_images(case):
    model, expected, images = case
    tokens = expected["input_ids"]
    logs = jax.nn.log_softmax(expected["logits"].astype(np.float32))
    wanted = np.take_along_axis(np.asarray(logs)[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(zoo.score(model, tokens, images=images), wanted, atol=1e-4)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "images": images}
    np.testing.assert_allclose(zoo.log_probs(model, batch), wanted, atol=1e-4)


def test_values_of_tower_and_decoder_are_captured(case):
    model, expected, images = case
    tokens = expected["input_ids"]
    known = zoo.capture_names(model, tokens, images)
    assert {"tower.layers.*", "decoder.layers.*", "projector", "decoder.layers.*.attention.out"} <= known.keys()
    logits, seen = zoo.capture(model, "tower.layers.*", "decoder.layers.0", "projector")(tokens, images)
    np.testing.assert_allclose(logits, model(tokens, images), atol=1e-4)
    features = np.asarray(seen["projector"])
    assert features.shape[:2] == (images.shape[0] * images.shape[1], features.shape[1])
    if "image_features" in expected:
        found = features[np.asarray(images).any((2, 3, 4)).reshape(-1)]
        np.testing.assert_allclose(found.reshape(-1), expected["image_features"].reshape(-1), atol=1e-3)
    first = zoo.hidden_states(model, tokens, images=images)[1]
    np.testing.assert_allclose(seen["decoder.layers.0"], first, atol=1e-4)


def test_what_a_model_of_images_and_texts_does_not_take(case):
    model, expected, images = case
    tokens = expected["input_ids"]
    for function in (
        zoo.hidden_states,
        zoo.score,
        lambda *args, **options: zoo.embed(*args, pooling="mean", **options),
    ):
        with pytest.raises(ValueError, match="row 0 has .* image tokens .* and its images have 0 features"):
            function(model, tokens)
        with pytest.raises(
            TypeError, match="Decoder reads texts only|images are embedded by TwoTowers, or by ImageText"
        ):
            function(model.decoder, tokens, images=images)
    with pytest.raises(
        AttributeError, match=r"'embedding': model.read\(images\) is a Decoder of texts with these images"
    ):
        getattr(model, "embedding")  # noqa: B009, it is not there
    places = zoo.models.image_places.PrefixSpan()
    prefixed = dataclasses.replace(model, places=places)
    with pytest.raises(ValueError, match="without spans every token is of the prefix"):
        zoo.score(prefixed, tokens, images=images)
    spans = jnp.zeros_like(tokens)
    causal = dataclasses.replace(model, places=zoo.models.image_places.CausalPlaces())
    np.testing.assert_allclose(
        zoo.score(prefixed, tokens, images=images, spans=spans), zoo.score(causal, tokens, images=images), atol=1e-5
    )
