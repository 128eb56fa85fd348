"""Inputs, activations and losses of decoders, of encoders of texts, images and audio, of both, of two towers, and of
texts with images."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zoo.layers import TokenInfo
from zoo.layers.encoders.masked_images import MaskedImages
from zoo.layers.encoders.packed_images import PackedImages
from zoo.layers.encoders.patches import PatchedImages
from zoo.models import (
    Encoder,
    EncoderDecoder,
    ImageEncoder,
    ImageText,
    SequenceScore,
    TwoTowers,
    classification_loss,
    contrastive_loss,
    token_losses,
)
from zoo.models.blocks import UnreadBlock
from zoo.models.encoders.audio import AudioEncoder
from zoo.models.encoders.heads import EncoderFeatures, MaskedLMHead
from zoo.models.loss import cross_entropy
from zoo.models.scoring import unstack_blocks
from zoo.weights.resolve import LoadedModel

from .activations import (
    Activations,
    DecoderInputs,
    PairInputs,
    TextInputs,
    run_audio_encoder,
    run_decoder,
    run_encoder,
    run_image_encoder,
    run_projector,
    run_towers,
)

_INPUTS = (
    *("input_ids", "attention_mask", "token_type_ids"),
    *("pixel_values", "pixel_attention_mask", "spatial_shapes"),
)
_GRIDS = ("image_grid_thw", "seconds")
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
        return _TARGETS
    if isinstance(model, AudioEncoder):
        return _AUDIO
    if isinstance(model, Encoder):
        return _TEXTS
    if isinstance(model, TwoTowers):
        return _PAIRS
    if isinstance(model, ImageText):
        return _SEEN
    return _TOKENS


def iterate_parts(
    model: LoadedModel, expected: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, LoadedModel, Mapping[str, np.ndarray]]]:
    """Yield the parts of a model that are compared layer by layer: a word for each, the part, and its expectations.

    An encoder-decoder is its encoder, and its decoder of targets of the given sources. Two towers are three parts, the
    last of them both together. A model of texts with images is its tower, of images of one size, the features of
    images, and its decoder of texts with these. Any other model is one.
    """
    if isinstance(model, EncoderDecoder):
        source = expected[_find_source(expected)]
        encoder = model.whole_encoder
        own = {find_model_kind(encoder).inputs: source}
        yield "encoder: ", encoder, {**own, **_take(expected, "encoder_hidden_states.")}
        own = {"input_ids": expected["decoder_input_ids"], "logits": expected["logits"]}
        decoder = model.read(jnp.asarray(source))
        yield "decoder: ", decoder, {**own, **_take(expected, "decoder_hidden_states.")}
        return
    if isinstance(model, TwoTowers):
        for word, prefix, tower in (("text: ", "text_", model.text), ("image: ", "vision_", model.image)):
            own = {name: expected[name] for name in _INPUTS if name in expected}
            own |= _take(expected, f"{prefix}hidden_states.", f"{prefix}last_hidden_state")
            if tower is model.text:  # the last of the hidden states is before the final norm there
                own.pop(f"hidden_states.{len(unstack_blocks(tower))}", None)
            yield word, tower, own
    if isinstance(model, ImageText):
        yield from _iterate_seen(model, expected)
        return
    yield "", model, expected


def _iterate_seen(model: ImageText, expected: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield the parts of a model of texts with images."""
    images = _read_image_rows(expected)
    if not isinstance(images, MaskedImages | PackedImages):
        pixels = expected["pixel_values"].reshape(-1, *images.shape[2:])
        own = {"pixel_values": pixels[pixels.any((1, 2, 3))], **_take(expected, "vision_hidden_states.")}
        blocks = unstack_blocks(model.tower)
        for number, block in enumerate(blocks, 1):
            if isinstance(block, UnreadBlock):  # hidden states pass it
                own.pop(f"hidden_states.{number}", None)
        yield "image: ", model.tower, own
    inputs = {name: expected[name] for name in (*_INPUTS, *_GRIDS) if name in expected}
    yield "", model, {"image_features": expected["image_features"], "input_ids": expected["input_ids"], **inputs}
    tokens = jnp.asarray(expected["input_ids"])
    spans = jnp.asarray(expected["spans"]) if "spans" in expected else None
    info = model.place_images(tokens, images, TokenInfo(), spans)
    places = {"lookahead": info.lookahead, "coordinates": info.coordinates}
    own = {name: x for name, x in expected.items() if name.startswith(("hidden_states.", "logits", "input_ids"))}
    yield "text: ", model.read(images), {**own, **{name: x for name, x in places.items() if x is not None}}


def _read_image_rows(expected: Mapping[str, np.ndarray]) -> Any:
    """Return the images of each row."""
    pixels = jnp.asarray(expected["pixel_values"])
    if "pixel_attention_mask" in expected:
        return MaskedImages(pixels, jnp.asarray(expected["pixel_attention_mask"] > 0))
    if "image_grid_thw" not in expected:
        return pixels
    return PackedImages(pixels, *(jnp.asarray(expected[name]) for name in _GRIDS if name in expected))


def _make_seen_loss(expected: Mapping[str, np.ndarray]) -> LossAndBatch:
    batch: dict[str, Any] = make_next_token_batch(expected["input_ids"])
    batch["targets"] = np.roll(expected["labels"], -1, axis=1).astype(np.int32)
    batch["images"] = _read_image_rows(expected)
    if "spans" in expected:
        batch["spans"] = expected["spans"]
    return cross_entropy, batch


def _read_decoder_inputs(expected: Mapping[str, np.ndarray]) -> DecoderInputs:
    places = {name: jnp.asarray(expected[name]) for name in ("lookahead", "coordinates") if name in expected}
    return DecoderInputs(jnp.asarray(expected["input_ids"]), TokenInfo(**places))


def _take(expected: Mapping[str, np.ndarray], *beginnings: str) -> dict[str, np.ndarray]:
    """Return the expectations of a part, without its name: `encoder_hidden_states.0` is `hidden_states.0`."""
    return {name.partition("_")[2]: x for name, x in expected.items() if name.startswith(beginnings)}


def _find_source(expected: Mapping[str, np.ndarray]) -> str:
    """Return the name of the sources in the expectations."""
    return "input_ids" if "input_ids" in expected else "input_features"


def _make_target_loss(expected: Mapping[str, np.ndarray]) -> LossAndBatch:
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


def _read_images(expected: Mapping[str, np.ndarray]) -> Any:
    if "spatial_shapes" not in expected:
        return jnp.asarray(expected["pixel_values"])
    mask = expected["pixel_attention_mask"] > 0
    grids = expected["spatial_shapes"].astype(np.int32)
    return PatchedImages(jnp.asarray(expected["pixel_values"]), jnp.asarray(mask), jnp.asarray(grids))


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
    _read_decoder_inputs,
    run_decoder,
    lambda x: (cross_entropy, make_next_token_batch(x["input_ids"])),
)
_TEXTS = ModelKind("input_ids", _read_texts, run_encoder, _make_text_loss)
_TARGETS = ModelKind(
    "decoder_input_ids", lambda x: DecoderInputs(jnp.asarray(x["decoder_input_ids"])), run_decoder, _make_target_loss
)
_SEEN = ModelKind("input_ids", _read_image_rows, run_projector, _make_seen_loss)
_AUDIO = ModelKind("input_features", lambda x: jnp.asarray(x["input_features"]), run_audio_encoder, _make_target_loss)
_IMAGES = ModelKind("pixel_values", _read_images, run_image_encoder, _make_image_loss)
_PAIRS = ModelKind(
    "pixel_values",
    lambda x: PairInputs(_read_texts(x), _read_images(x)),
    run_towers,
    lambda x: (contrastive_loss, {**_make_text_batch(x), "images": _read_images(x)}),
)
