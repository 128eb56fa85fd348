"""Inputs of layers besides the residual stream: embeddings of their own, and keys and values of earlier layers."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from zoo.layers import (
    AbstractFeedForward,
    AbstractLinear,
    AbstractNorm,
    Dropout,
    Embedding,
    HashRouter,
    Linear,
    RMSNorm,
    TokenInfo,
)
from zoo.layers.abstract import run_feed_forward
from zoo.layers.attention.cross_layer import CrossLayerAttention, SharedKeyValues
from zoo.layers.embedding import AbstractEmbedding
from zoo.layers.moe.mixture import AbstractMixture
from zoo.parallel import Dim, Module, buffer, named_by_class
from zoo.parallel.tokens import match_tokens, run_on_all_tokens
from zoo.shapes import ResidualStream, Tokens

from .decoder import AbstractBlock, AbstractLayerInputs, AbstractMixerBlock, Hidden


class EmbeddedHidden(Hidden):
    """Hidden states with the embedding of the tokens, for layers that read it again."""

    constant_fields = ("embedded",)

    embedded: ResidualStream | None = None


class EmbeddingInputs(AbstractLayerInputs):
    """Hand the embedding on to every layer."""

    def __call__(self, tokens: Tokens, x: ResidualStream) -> EmbeddedHidden:
        return EmbeddedHidden(x, embedded=x)


class TokenHidden(Hidden):
    """Hidden states with the ids of the tokens, for layers that route by them or look them up."""

    constant_fields = ("tokens",)

    tokens: Tokens | None = None


def route_by_token(ffn: AbstractFeedForward, hidden: Hidden) -> AbstractFeedForward:
    """Return a mixture of experts with a `HashRouter` that has the ids of the tokens; any other layer as it is."""
    if not isinstance(hidden, TokenHidden) or not has_hash_router(ffn):
        return ffn
    return eqx.tree_at(lambda x: x.router.tokens, ffn, hidden.tokens, is_leaf=lambda x: x is None)


def has_hash_router(ffn: AbstractFeedForward) -> bool:
    """Return True for a mixture of experts with a `HashRouter`. It decides nothing that a loss could balance."""
    return isinstance(ffn, AbstractMixture) and isinstance(ffn.router, HashRouter)


class LayerHidden(Hidden):
    """Hidden states with the additional inputs of `LayerInputBlock`s."""

    constant_fields = ("inputs",)

    inputs: Float[Array, "batch tokens features"] | None = None
    """Inputs of each layer, one after the other; None if layers have none."""
    number: Int[Array, ""] | None = None
    """Number of the next layer."""
    shared: dict[str, SharedKeyValues] = eqx.field(default_factory=dict)
    """Keys and values of earlier layers, by the names under which they store them."""

    def take_inputs(self, width: int) -> Float[Array, "batch tokens _"]:
        """Return the inputs of the next layer, of `width` features."""
        assert self.inputs is not None and self.number is not None  # `LayerInputs` counts from 0
        return lax.dynamic_slice_in_dim(self.inputs, self.number * width, width, axis=2)

    def count_layer(self) -> "LayerHidden":
        """Count this layer."""
        assert self.number is not None
        return dataclasses.replace(self, number=1 + self.number)


def require_layer_hidden(hidden: Hidden, block: AbstractBlock) -> LayerHidden:
    """Return hidden states with layer inputs. **Raises** `TypeError` for others, which another decoder has made."""
    if isinstance(hidden, LayerHidden):
        return hidden
    raise TypeError(
        f"{type(block).__name__} reads layer inputs and shared keys, which {type(hidden).__name__} has not: run the "
        "layers in their model, or begin with the LayerHidden that model.embed(tokens, info) returns"
    )


class LayerInputs(AbstractLayerInputs):
    """Per-layer embeddings (PLE; Gemma 3n, 2025): the input of layer i is (E_i[token] + norm(W_i x)) / sqrt(2), of the
    token and of its embedding x, times sqrt(width) and 1 / sqrt(embed). Without a `width` layers have no inputs.

    The sum of all layers is one table and one matrix: layer i has columns i width to (i + 1) width.
    """

    embedding: AbstractEmbedding | None
    projection: AbstractLinear | None
    norm: AbstractNorm | None

    width: int = eqx.field(static=True)

    def __init__(self, vocab: int, embed: int, layers: int, width: int, *, epsilon: float = 1e-6, key: Key[Array, ""]):
        """`vocab`: rows of the table of per-layer embeddings. `width`: features of a layer's input."""
        embedding_key, projection_key = jax.random.split(key)
        self.embedding = None
        self.projection = None
        self.norm = None
        self.width = width
        if width:
            options = {"scale": width**-0.5, "multiplier": width**0.5}
            self.embedding = Embedding(vocab, layers * width, **options, key=embedding_key)
            size = layers * width
            dims = (Dim("embed"), Dim("latent"))
            self.projection = Linear(embed, size, in_=dims[0], out=dims[1], key=projection_key)
            self.norm = RMSNorm(width, features=Dim("head_dim"), epsilon=epsilon)

    def __call__(self, tokens: Tokens, x: ResidualStream) -> LayerHidden:
        number = jnp.zeros((), jnp.int32)
        if self.embedding is None or self.projection is None or self.norm is None:
            return LayerHidden(x, number=number)
        embedded = self.embedding(tokens)
        projected = self.projection(x) * x.shape[-1] ** -0.5
        by_layer = projected.reshape(*projected.shape[:2], -1, self.width)
        projected = self.norm(by_layer).reshape(projected.shape)
        return LayerHidden(x, inputs=(projected + embedded) * 2**-0.5, number=number)


class LayerInputProjection(Module):
    """norm(W_out (activation(W_gate x) * input)): what a layer adds of its own input."""

    gate: AbstractLinear
    out: AbstractLinear
    norm: AbstractNorm

    activation: Callable = eqx.field(static=True)
    width: int = eqx.field(static=True)

    def __init__(
        self, embed: int, width: int, norm: Callable[[], AbstractNorm], activation: Callable, *, key: Key[Array, ""]
    ):
        gate_key, out_key = jax.random.split(key)
        self.gate = Linear(embed, width, in_=Dim("embed"), out=Dim("latent"), key=gate_key)
        self.out = Linear(width, embed, in_=Dim("latent"), out=Dim("embed"), key=out_key)
        self.norm = norm()
        self.activation = activation
        self.width = width

    def __call__(self, x: ResidualStream, inputs: Float[Array, "batch tokens features"]) -> ResidualStream:
        return self.norm(self.out(self.activation(self.gate(x)) * inputs))


class LayerInputBlock(AbstractMixerBlock):
    """`zoo.models.blocks.SandwichBlock`, then x + inputs(x, input of this layer), and all of it times a constant
    `layer_scale`, which is not trained (Gemma 4, 2026). Keys and values of earlier layers reach its attention."""

    mixer_norm: AbstractNorm
    mixer: CrossLayerAttention = named_by_class()
    mixer_post_norm: AbstractNorm
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    ffn_post_norm: AbstractNorm
    dropout: Dropout
    inputs: LayerInputProjection | None
    layer_scale: Float[Array, "1"] = buffer()

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        """**Raises** `TypeError` for hidden states without layer inputs, as from another decoder."""
        hidden = require_layer_hidden(hidden, self)
        normed = self.mixer_norm(hidden.x)
        mixed, (state, shared) = run_on_all_tokens(self.mixer.mix, normed, info, state, hidden.shared)
        mixed = self.dropout(self.mixer_post_norm(mixed), info, site=0)
        layer = dataclasses.replace(hidden, shared=shared).add_residual(mixed)
        fed, routing = run_feed_forward(self.ffn, self.ffn_norm(layer.x))
        fed = checkpoint_name(fed, "ffn_output")
        layer = layer.add_residual(self.dropout(self.ffn_post_norm(fed), info, site=1), routing)
        if self.inputs is not None:
            own = hidden.take_inputs(self.inputs.width)
            layer = layer.add_residual(match_tokens(self.inputs(layer.x, own), layer.x))
        layer = dataclasses.replace(layer, x=layer.x * self.layer_scale.astype(layer.x.dtype))
        return cast(LayerHidden, layer).count_layer(), state
