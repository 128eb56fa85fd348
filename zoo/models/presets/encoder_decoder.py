"""Transformer with an encoder and a decoder, initialized from scratch."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
from jaxtyping import Array, Key

from zoo._checks import wrap_key
from zoo._keywords import check_keywords
from zoo.layers import AbstractMixer, GatedMLP, RMSNorm
from zoo.layers.attention.cross import CrossAttention
from zoo.layers.embedding import SharedEmbedding
from zoo.layers.encoders.bidirectional_attention import BidirectionalAttention
from zoo.layers.linear import resolve_head_dim
from zoo.ops.rotary import Rotary
from zoo.parallel.remat import Remat

from ..build import build_decoder
from ..cross_blocks import CrossBlock, make_cross_block
from ..decoder import Block
from ..encoder_decoder import EncoderDecoder
from ..encoders.heads import make_feature_head
from ..encoders.text import build_encoder
from ..loop import Loop
from .mixers import make_mixer_pattern


@check_keywords
def EncoderDecoderTransformer(
    *,
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    encoder_layers: int | None = None,
    mixer: Callable[..., AbstractMixer] | None = None,
    start: tuple[int, ...] = (0,),
    dropout: float = 0.0,
    remat: Remat = "none",
    loop: Loop = "auto",
    implementation: str | Callable = "auto",
    key: Key[Array, ""],
) -> EncoderDecoder:
    """Build an encoder and a decoder (Vaswani et al., arXiv:1706.03762) of the layers of `Transformer`: RMSNorm before
    each sublayer, RoPE, SwiGLU, no biases. Encoder, decoder and head share one embedding.

    - `layers`: of the decoder, and of the encoder unless `encoder_layers` is given.
    - `mixer`: of the decoder, instead of `Attention`, as for `Transformer`: any of `zoo.layers`.
    - `start`: token ids that every target begins with.

    Other options are as for `Transformer`. **Raises** `ValueError` for sizes that do not fit together.
    """
    if encoder_layers is None:
        encoder_layers = layers
    if min(layers, encoder_layers) < 1:
        raise ValueError(f"encoder and decoder have at least 1 layer each, not {encoder_layers} and {layers}")
    encoder_key, decoder_key = jax.random.split(wrap_key(key))
    norm = partial(RMSNorm, embed)
    common = {"vocab": vocab, "embed": embed, "norm": norm, "dropout": dropout, "remat": remat, "loop": loop}
    out_scale = (2 * encoder_layers) ** -0.5
    rotary = Rotary(resolve_head_dim(embed, heads, None))
    options = {"rotary": rotary, "out_scale": out_scale, "implementation": implementation}
    both_ways = partial(BidirectionalAttention, embed, heads, **options)
    encoder = build_encoder(
        layers=[(both_ways, partial(GatedMLP, embed, mlp, out_scale=out_scale))] * encoder_layers,
        head=make_feature_head,
        block=Block,
        final_norm=norm,
        key=encoder_key,
        **common,
    )
    out_scale = (3 * layers) ** -0.5
    (causal,) = make_mixer_pattern(mixer, embed, heads, implementation=implementation, out_scale=out_scale)
    decoder = build_decoder(
        layers=[(causal, partial(GatedMLP, embed, mlp, out_scale=out_scale))] * layers,
        tied=True,
        block=make_cross_block(CrossBlock, norm),
        parts={"cross": partial(CrossAttention, embed, heads, implementation=implementation, out_scale=out_scale)},
        key=decoder_key,
        **common,
    )
    return EncoderDecoder(dataclasses.replace(encoder, embedding=SharedEmbedding()), decoder, start=start)
