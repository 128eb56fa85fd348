"""Inputs, activations and losses of decoders, of encoders of texts and of images, and of encoders with a decoder."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zoo.models import Encoder, EncoderDecoder, ImageEncoder, SequenceScore, classification_loss, token_losses
from zoo.models.encoders.audio import AudioEncoder
from zoo.models.encoders.heads import EncoderFeatures, MaskedLMHead
from zoo.models.loss import cross_entropy
from zoo.weights.resolve import LoadedModel

from .activations import (
    Activations,
    TextInputs,
    run_audio_encoder,
    run_decoder,
    run_encoder,
    run_image_encoder,
)

LossAndBatch = tuple[Callable, dict[str, np.ndarray]]


class ModelKind(NamedTuple):
    """The functions that compare one kind of model."""

    inputs: str
    """Name of the inputs in the expectations."""
    read: Callable[[Mapping[str, np.ndarray]], Any]
    run: Callable[..., Activations]
    make_loss: Callable[[Mapping[str, np.ndarray]], LossAndBatch]
    """Returns a loss function and its batch."""


def find_model_kind(model: LoadedModel) -> ModelKind:
    """Return the kind of a model. **Raises** `TypeError` for a `SequenceScore`."""
    if isinstance(model, SequenceScore):
        raise TypeError(
            "a SequenceScore has scores of texts, and logits of tokens are compared: compare its language model"
        )
    if isinstance(model, ImageEncoder):
        return _IMAGES
    if isinstance(model, EncoderDecoder):
        return _PAIRS
    if isinstance(model, AudioEncoder):
        return _AUDIO
    if isinstance(model, Encoder):
        return _TEXTS
    return _TOKENS


def list_parts(
    model: LoadedModel, expected: Mapping[str, np.ndarray]
) -> list[tuple[str, LoadedModel, Mapping[str, np.ndarray]]]:
    """Return the models whose activations are compared, each with a name before its comparisons and its expectations:
    the model itself, or its encoder, and its decoder of targets of the given sources."""
    if not isinstance(model, EncoderDecoder):
        return [("", model, expected)]
    source = expected[_find_source(expected)]
    parts = {"encoder": model.whole_encoder, "decoder": model.read(jnp.asarray(source))}
    listed = []
    for name, part in parts.items():
        beginning = f"{name}_hidden_states."
        own = {f"hidden_states.{key.removeprefix(beginning)}": x for key, x in expected.items() if beginning in key}
        if name == "encoder":
            own[find_model_kind(part).inputs] = source
        else:
            own |= {"input_ids": expected["decoder_input_ids"], "logits": expected["logits"]}
        listed.append((f"{name}: ", part, own))
    return listed


def _find_source(expected: Mapping[str, np.ndarray]) -> str:
    """Return the name of the sources in the expectations."""
    return "input_ids" if "input_ids" in expected else "input_features"


def _make_pair_loss(expected: Mapping[str, np.ndarray]) -> LossAndBatch:
    name = _find_source(expected)
    source = {"input_ids": "source", "input_features": "features"}[name]
    return cross_entropy, {
        source: expected[name],
        "tokens": expected["decoder_input_ids"],
        "targets": expected["labels"].astype(np.int32),
    }


def make_next_token_batch(tokens: Any) -> dict[str, np.ndarray]:
    """Return a batch whose targets are the next tokens. The last token of a row has no target, so its weight is 0."""
    tokens = np.asarray(tokens)
    weights = np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0
    return {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "weights": weights}


def feature_loss(
    model: ImageEncoder, batch: Mapping[str, Array], *, key: Any = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return mean(last_hidden_state²) / 2 + mean(pooler_output²) / 2 of each image, summed, and the number of images: a
    loss for comparing gradients of features."""
    return _sum_feature_squares(model(batch["images"], key=key), len(batch["images"]))


def _sum_feature_squares(features: Any, rows: int) -> tuple[Array, Array]:
    assert isinstance(features, EncoderFeatures)  # the expectations have no labels
    total = jnp.square(features.last_hidden_state).mean((1, 2)).sum() / 2
    if features.pooler_output is not None:
        total = total + jnp.square(features.pooler_output).mean(1).sum() / 2
    return total, jnp.float32(rows)


def _make_image_loss(expected: Mapping[str, np.ndarray]) -> LossAndBatch:
    batch = {"images": expected["pixel_values"]}
    if "labels" not in expected:
        return feature_loss, batch
    return classification_loss, {**batch, "labels": expected["labels"].astype(np.int32)}


def _make_text_batch(expected: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    batch: dict[str, np.ndarray] = {"tokens": expected["input_ids"]}
    if "attention_mask" in expected:
        batch["mask"] = expected["attention_mask"] > 0
    if "token_type_ids" in expected:
        batch["token_types"] = expected["token_type_ids"]
    return batch


def _read_texts(expected: Mapping[str, np.ndarray]) -> TextInputs:
    return TextInputs(**{name: jnp.asarray(x) for name, x in _make_text_batch(expected).items()})


def _make_text_loss(expected: Mapping[str, np.ndarray]) -> LossAndBatch:
    batch = _make_text_batch(expected)
    if "last_hidden_state" in expected:
        return text_feature_loss, batch
    labels = expected.get("labels", expected["input_ids"]).astype(np.int32)
    return text_loss, {**batch, "labels": labels}


def text_loss(model: Encoder, batch: Mapping[str, Array], *, key: Any = None) -> tuple[Array, Array]:
    """Return `classification_loss`, or for a masked LM the cross-entropy of `labels`, for texts with padding and
    types."""
    if not isinstance(model.head, MaskedLMHead):
        return classification_loss(model, batch, key=key)
    losses = token_losses(_run_encoder(model, batch, key), batch["labels"])
    return losses.sum(), (batch["labels"] >= 0).sum().astype(jnp.float32)


def text_feature_loss(model: Encoder, batch: Mapping[str, Array], *, key: Any = None) -> tuple[Array, Array]:
    """Return `feature_loss` for texts, with features of padding as 0."""
    features = _run_encoder(model, batch, key)
    mask = batch.get("mask", jnp.ones(batch["tokens"].shape, bool))
    hidden = features.last_hidden_state * mask[..., None]
    return _sum_feature_squares(EncoderFeatures(hidden, features.pooler_output), len(hidden))


def _run_encoder(model: Encoder, batch: Mapping[str, Array], key: Any) -> Any:
    inputs = {name: batch[name] for name in ("mask", "token_types") if name in batch}
    return model(batch["tokens"], key=key, **inputs)


_TOKENS = ModelKind(
    "input_ids",
    lambda x: jnp.asarray(x["input_ids"]),
    run_decoder,
    lambda x: (cross_entropy, make_next_token_batch(x["input_ids"])),
)
_TEXTS = ModelKind("input_ids", _read_texts, run_encoder, _make_text_loss)
_PAIRS = ModelKind("decoder_input_ids", lambda x: jnp.asarray(x["decoder_input_ids"]), run_decoder, _make_pair_loss)
_AUDIO = ModelKind("input_features", lambda x: jnp.asarray(x["input_features"]), run_audio_encoder, _make_pair_loss)
_IMAGES = ModelKind("pixel_values", lambda x: jnp.asarray(x["pixel_values"]), run_image_encoder, _make_image_loss)
