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
from zoo.layers.moe.routing import Routing
from zoo.models import Decoder, Encoder, Hidden, ImageEncoder
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
    streams are side by side, "batch seq features", and the last is after that norm. Other expectations are returned as
    they are.
    """
    names = [name for name, x in expected.items() if "hidden_states." in name and x.ndim == 4]
    last = max((int(name.rpartition(".")[2]) for name in names), default=0)
    joined = {}
    for name in names:
        x = expected[name]
        x = np.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1)
        if name.endswith(f".{last}"):
            x = np.asarray(model.norm(jnp.asarray(x)))
        joined[name] = x
    return {**expected, **joined}


def run_decoder(model: Decoder, blocks: Sequence[Any], tokens: Array, inputs: Mapping[int, np.ndarray]) -> Activations:
    """Run a decoder on tokens, and each layer by itself on its input in `inputs`, by the number of the hidden state."""
    skip_embedding = model.hidden_states_skip_embedding
    hidden = _embed(model, tokens)
    alone = {}
    routings = []
    outputs = [hidden.x]
    for layer, block in enumerate(blocks):
        number = layer if skip_embedding else layer + 1
        if number - 1 in inputs:
            given = dataclasses.replace(hidden, x=jnp.asarray(inputs[number - 1]))
            alone[number] = _run_block(block, given, TokenInfo())[0].x
        hidden, routing = _run_block(block, hidden, TokenInfo())
        outputs.append(hidden.x)
        routings += routing
    last = len(blocks)
    if skip_embedding and last - 1 in inputs:
        alone[last], _ = _run_head(model, jnp.asarray(inputs[last - 1]))
    elif not skip_embedding and last in alone:
        alone[last], _ = _run_head(model, alone[last])
    final, logits = _run_head(model, outputs[-1])
    before = outputs[1:] if skip_embedding else outputs[:-1]
    states = [*before, final]
    router_logits = [np.asarray(routing.logits).reshape(-1, routing.logits.shape[-1]) for routing in routings]
    return Activations(states, alone, {"logits": logits}, router_logits)


def run_image_encoder(
    model: ImageEncoder, blocks: Sequence[Any], images: Array, inputs: Mapping[int, np.ndarray]
) -> Activations:
    """Run a vision Transformer on images, and each layer by itself on its input in `inputs`, by the number of the
    hidden state."""
    hidden, info = _embed_images(model, images)
    states = [hidden.x]
    alone = {}
    for layer, block in enumerate(blocks):
        hidden, _ = _run_block(block, hidden, info)
        states.append(hidden.x)
        if layer in inputs:
            alone[layer + 1] = _run_block(block, Hidden(jnp.asarray(inputs[layer])), info)[0].x
    result = _run_image_head(model, states[-1])
    if isinstance(result, EncoderFeatures):
        outputs = {"last_hidden_state": result.last_hidden_state, "pooler_output": result.pooler_output}
    else:
        outputs = {"logits": result}
    return Activations(states, alone, {name: x for name, x in outputs.items() if x is not None}, [])


class TextInputs(NamedTuple):
    """Inputs of an encoder of texts."""

    tokens: Array
    mask: Array | None
    token_types: Array | None

    def zero_padding(self, x: Any) -> Any:
        """Set the features of padding, "batch seq features" or "batch seq", to 0, since models do not define them."""
        if self.mask is None:
            return x
        if x.shape == self.mask.shape:
            return x * self.mask
        if x.ndim < 3:
            return x
        return x * self.mask[..., None]


def run_encoder(
    model: Encoder, blocks: Sequence[Any], texts: TextInputs, inputs: Mapping[int, np.ndarray]
) -> Activations:
    """Run an encoder on texts, and each layer by itself on its input in `inputs`, by the number of the hidden state.
    Features of padding are 0."""
    hidden, info = _embed_texts(model, texts)
    outputs = [hidden.x]
    alone = {}
    for layer, block in enumerate(blocks):
        if layer in inputs:
            given = dataclasses.replace(hidden, x=jnp.asarray(inputs[layer]))
            alone[layer + 1] = _run_block(block, given, info)[0].x
        hidden, _ = _run_block(block, hidden, info)
        outputs.append(hidden.x)
    last = len(blocks)
    final, results = _run_encoder_head(model, outputs[-1], texts.mask)
    if last in alone:
        alone[last] = _run_encoder_head(model, alone[last], texts.mask)[0]
    states = [texts.zero_padding(x) for x in (*outputs[:-1], final)]
    alone = {number: texts.zero_padding(x) for number, x in alone.items()}
    return Activations(states, alone, {name: texts.zero_padding(x) for name, x in results.items()}, [])


@eqx.filter_jit
def _embed(model: Decoder, tokens: Array) -> Hidden:
    return model.embed(tokens, TokenInfo())


@eqx.filter_jit
def _embed_images(model: ImageEncoder, images: Array) -> tuple[Hidden, TokenInfo]:
    info = model.token_info(images)
    return model.embed(images, info), info


@eqx.filter_jit
def _embed_texts(model: Encoder, texts: TextInputs) -> tuple[Hidden, TokenInfo]:
    info = model.token_info(texts.tokens, mask=texts.mask, token_types=texts.token_types)
    return model.embed(texts.tokens, info), info


@eqx.filter_jit
def _run_encoder_head(model: Encoder, x: Array, mask: Array | None) -> tuple[Array, dict[str, Array]]:
    x = model.norm(x)
    result = model.read_head(x, mask)
    if not isinstance(result, EncoderFeatures):
        return x, {"logits": result}
    found = {"last_hidden_state": result.last_hidden_state, "pooler_output": result.pooler_output}
    return x, {name: value for name, value in found.items() if value is not None}


@eqx.filter_jit
def _run_block(block: Any, hidden: Hidden, info: TokenInfo) -> tuple[Hidden, tuple[Routing, ...]]:
    hidden, _ = block(hidden, info)
    return hidden.drop_routing(), hidden.decisions


@eqx.filter_jit
def _run_head(model: Decoder, x: Array) -> tuple[Array, Array]:
    x = model.norm(x)
    return x, model.logits(x)


@eqx.filter_jit
def _run_image_head(model: ImageEncoder, x: Array) -> Array | EncoderFeatures:
    return model.head(model.norm(x))
