"""Activations of a model, layer by layer, and of each layer on given inputs.

One program is compiled per kind of layer, instead of one for all layers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from zoo.layers import TokenInfo
from zoo.layers.encoders.patches import PatchedImages
from zoo.layers.moe.routing import Routing
from zoo.models import Decoder, Encoder, Hidden, ImageEncoder, ImageText, TwoTowers
from zoo.models.encoders.audio import AudioEncoder
from zoo.models.encoders.heads import EncoderFeatures


class Activations(NamedTuple):
    """Activations of a forward pass, layer by layer."""

    hidden_states: list[Array]
    """As transformers counts them: the last is after the final norm, except in an image encoder."""
    layers_alone: dict[int, Array]
    """Output of each layer whose input was given, by the number of its hidden state."""
    outputs: dict[str, Array]
    """Results of the model, by their names in transformers: `logits`, or `last_hidden_state` and `pooler_output`."""
    router_logits: list[np.ndarray]
    """One per layer that has a router, "tokens experts"."""


def join_streams(model: Any, expected: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return expectations with the hidden states of parallel residual streams (Gemma 3n's) in our form.

    In transformers they are "streams batch seq embed", and the last of them, too, is before the final norm. Here
    streams are side by side, "batch seq features", and the last is after that norm. DeepSeek-V4's are "batch seq
    streams embed", and the last has no streams. Other expectations are returned as they are.
    """
    names = [name for name, x in expected.items() if "hidden_states." in name and x.ndim == 4]
    last = max((int(name.rpartition(".")[2]) for name in names), default=0)
    follows = any(name.endswith(f"hidden_states.{last + 1}") for name in expected)
    joined = {}
    for name in names:
        x = expected[name]
        if follows:
            joined[name] = x.reshape(*x.shape[:2], -1)
            continue
        x = np.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1)
        if name.endswith(f".{last}"):
            x = np.asarray(model.norm(jnp.asarray(x)))
        joined[name] = x
    return {**expected, **joined}


class DecoderInputs(NamedTuple):
    """Inputs of a decoder."""

    tokens: Array
    info: TokenInfo = TokenInfo()


def run_decoder(
    model: Decoder, blocks: Sequence[Any], texts: DecoderInputs, inputs: Mapping[int, np.ndarray]
) -> Activations:
    """Run a decoder on tokens, and each layer by itself on its input in `inputs`, by the number of the hidden state."""
    skipped = int(model.hidden_states_skip_embedding)
    given = {number + skipped: x for number, x in inputs.items()}
    outputs, alone, routings = _run_layers(blocks, _embed(model, texts), texts.info, given)
    alone = {number - skipped: x for number, x in alone.items()}
    last = len(blocks)
    before_norm = given.get(last) if skipped else alone.get(last)
    if before_norm is not None:
        alone[last], _ = _run_head(model, jnp.asarray(before_norm))
    final, logits = _run_head(model, outputs[-1])
    states = [*outputs[skipped : last + skipped], final]
    router_logits = [np.asarray(routing.logits).reshape(-1, routing.logits.shape[-1]) for routing in routings]
    return Activations(states, alone, {"logits": logits}, router_logits)


def run_image_encoder(
    model: ImageEncoder, blocks: Sequence[Any], images: Array | PatchedImages, inputs: Mapping[int, np.ndarray]
) -> Activations:
    """Run a vision Transformer on images, and each layer by itself on its input in `inputs`, by the number of the
    hidden state."""
    states, alone, _ = _run_layers(blocks, *_embed_images(model, images), inputs)
    results = _name_results(_run_image_head(model, states[-1], images))
    if isinstance(images, PatchedImages):
        states = [zero_padding(x, images.mask) for x in states]
        alone = {number: zero_padding(x, images.mask) for number, x in alone.items()}
        results = {name: zero_padding(x, images.mask) for name, x in results.items()}
    return Activations(states, alone, results, [])


class TextInputs(NamedTuple):
    """Inputs of an encoder of texts."""

    tokens: Array
    mask: Array | None = None
    token_types: Array | None = None


def zero_padding(x: Any, mask: Array | None) -> Any:
    """Set the features of padding, "batch seq features" or "batch seq", to 0, since models do not define them."""
    if mask is None:
        return x
    if x.shape == mask.shape:
        return x * mask
    if x.ndim < 3:
        return x
    return x * mask[..., None]


def run_encoder(
    model: Encoder, blocks: Sequence[Any], texts: TextInputs, inputs: Mapping[int, np.ndarray]
) -> Activations:
    """Run an encoder on texts, and each layer by itself on its input in `inputs`, by the number of the hidden state.
    Features of padding are 0."""
    outputs, alone, _ = _run_layers(blocks, *_embed_texts(model, texts), inputs)
    last = len(blocks)
    final, result = _run_encoder_head(model, outputs[-1], texts)
    if last in alone:
        alone[last], _ = _run_encoder_head(model, alone[last], texts)
    states = [zero_padding(x, texts.mask) for x in (*outputs[:-1], final)]
    alone = {number: zero_padding(x, texts.mask) for number, x in alone.items()}
    results = {name: zero_padding(x, texts.mask) for name, x in _name_results(result).items()}
    return Activations(states, alone, results, [])


class PairInputs(NamedTuple):
    """Inputs of two towers."""

    texts: TextInputs
    images: Array | PatchedImages


def run_towers(
    model: TwoTowers, blocks: Sequence[Any], pairs: PairInputs, inputs: Mapping[int, np.ndarray]
) -> Activations:
    """Run two towers on texts and images. They have no layers in common."""
    return Activations([], {}, _run_towers(model, pairs), [])


@eqx.filter_jit
def _run_towers(model: TwoTowers, pairs: PairInputs) -> dict[str, Array]:
    tokens, mask, token_types = pairs.texts
    texts = model.embed_texts(tokens, mask=mask, token_types=token_types)
    images = model.embed_images(pairs.images)
    logits = model.similarity(images, texts)
    return {"text_embeds": texts, "image_embeds": images, "logits_per_image": logits, "logits_per_text": logits.T}


def run_projector(
    model: ImageText, blocks: Sequence[Any], images: Any, inputs: Mapping[int, np.ndarray]
) -> Activations:
    """Compute the features of images, without padding, one row after the other."""
    features, _ = eqx.filter_jit(model.embed_images)(images)
    counts = model.count_features(images)
    return Activations(
        [], {}, {"image_features": jnp.concatenate([x[:n] for x, n in zip(features, counts, strict=True)])}, []
    )


def run_audio_encoder(
    model: AudioEncoder, blocks: Sequence[Any], features: Array, inputs: Mapping[int, np.ndarray]
) -> Activations:
    """Run an encoder of audio, and each layer by itself on its input in `inputs`, by the number of the hidden state."""
    outputs, alone, _ = _run_layers(blocks, *_embed_images(model, features), inputs)
    last = len(blocks)
    if last in alone:
        alone[last] = _run_norm(model, alone[last])
    return Activations([*outputs[:-1], _run_norm(model, outputs[-1])], alone, {}, [])


def _run_layers(
    blocks: Sequence[Any], hidden: Hidden, info: TokenInfo, inputs: Mapping[int, np.ndarray]
) -> tuple[list[Array], dict[int, Array], list[Routing]]:
    """Run every layer on the output of the layer before it, and by itself on its input in `inputs`, by layer.

    Returns the first input and all outputs, the outputs of layers by themselves, numbered from 1, and the routings.
    """
    outputs = [hidden.x]
    alone = {}
    routings = []
    for layer, block in enumerate(blocks):
        if layer in inputs:
            given = dataclasses.replace(hidden, x=jnp.asarray(inputs[layer]))
            alone[layer + 1] = _run_block(block, given, info)[0].x
        hidden, routing = _run_block(block, hidden, info)
        outputs.append(hidden.x)
        routings += routing
    return outputs, alone, routings


def _name_results(result: Array | EncoderFeatures) -> dict[str, Array]:
    """Return the results of an encoder by their names in transformers."""
    if not isinstance(result, EncoderFeatures):
        return {"logits": result}
    found = {"last_hidden_state": result.last_hidden_state, "pooler_output": result.pooler_output}
    return {name: x for name, x in found.items() if x is not None}


@eqx.filter_jit
def _embed(model: Decoder, texts: DecoderInputs) -> Hidden:
    return model.embed(texts.tokens, texts.info)


@eqx.filter_jit
def _embed_images(model: ImageEncoder | AudioEncoder, images: Any) -> tuple[Hidden, TokenInfo]:
    info = model.token_info(images)
    return model.embed(images, info), info


@eqx.filter_jit
def _embed_texts(model: Encoder, texts: TextInputs) -> tuple[Hidden, TokenInfo]:
    info = model.token_info(texts.tokens, mask=texts.mask, token_types=texts.token_types)
    return model.embed(texts.tokens, info), info


@eqx.filter_jit
def _run_norm(model: AudioEncoder, x: Array) -> Array:
    return model.norm(x)


@eqx.filter_jit
def _run_encoder_head(model: Encoder, x: Array, texts: TextInputs) -> tuple[Array, Array | EncoderFeatures]:
    x = model.norm(x)
    return x, model.read_head(x, texts.mask, texts.tokens)


@eqx.filter_jit
def _run_block(block: Any, hidden: Hidden, info: TokenInfo) -> tuple[Hidden, tuple[Routing, ...]]:
    hidden, _ = block(hidden, info)
    return hidden.drop_routing(), hidden.decisions


@eqx.filter_jit
def _run_head(model: Decoder, x: Array) -> tuple[Array, Array]:
    x = model.norm(x)
    return x, model.logits(x)


@eqx.filter_jit
def _run_image_head(model: ImageEncoder, x: Array, images: Array | PatchedImages) -> Array | EncoderFeatures:
    return model.read_head(model.norm(x), images)
