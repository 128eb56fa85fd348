"""Building blocks of the families that encode a source and decode a target."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers.attention.cross import CrossAttention
from zoo.layers.embedding import SharedEmbedding

from ..build import LayerFactories
from ..cross_blocks import AbstractCrossBlock, make_cross_block
from ..decoder import Decoder
from ..encoder_decoder import EncoderDecoder
from ..encoders.heads import make_feature_head
from ..encoders.text import Encoder, build_encoder
from .builders import build_config_decoder, compute_out_scale, read_head_sizes
from .kinds import optional_non_negative
from .spec import Config

START_DEFAULTS: dict[str, Any] = {
    "decoder_start_token_id": optional_non_negative(),
    "forced_bos_token_id": optional_non_negative(),
}
"""Defaults of the keys that say what a target begins with."""


def make_cross_attention_factory(config: Config, **options: Any) -> Callable[..., CrossAttention]:
    """Return a factory of `CrossAttention` with the sizes of the config, and these options."""
    heads, kv_heads, head_dim = read_head_sizes(config)
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "out_scale": compute_out_scale(config)}
    return partial(CrossAttention, config["hidden_size"], heads, **{**sizes, **options})


def build_source_encoder(
    config: Config, layers: Sequence[LayerFactories], norm: Callable[[], Any], *, key: Key[Array, ""], **options: Any
) -> Encoder:
    """Call `build_encoder` with the sizes of the config, for an encoder without a head."""
    sizes = {"vocab": config["vocab_size"], "embed": config["hidden_size"]}
    return build_encoder(layers=layers, norm=norm, head=make_feature_head, key=key, **sizes, **options)


def build_target_decoder(
    config: Config,
    layers: Sequence[LayerFactories],
    norm: Callable[[], Any],
    cross: Callable[..., CrossAttention],
    *,
    block: Callable[..., AbstractCrossBlock],
    key: Key[Array, ""],
    **options: Any,
) -> Decoder:
    """Call `build_decoder` with the sizes of the config, for layers with cross-attention, which `cross` makes, in
    blocks of this class."""
    options = {"block": make_cross_block(block, norm), "parts": {"cross": cross}, **options}
    return build_config_decoder(config, layers, norm, key=key, **options)


def join_encoder_decoder(config: Config, encoder: Encoder, decoder: Decoder) -> EncoderDecoder:
    """Join an encoder to a decoder whose embedding it shares."""
    encoder = dataclasses.replace(encoder, embedding=SharedEmbedding())
    return EncoderDecoder(encoder, decoder, start=read_start(config))


def read_start(config: Config) -> tuple[int, ...]:
    """Return the tokens that every target begins with: the start token, and the forced one. mBART's files may have
    neither: their targets begin with a language."""
    tokens = (config["decoder_start_token_id"], config["forced_bos_token_id"])
    return tuple(token for token in tokens if token is not None)
