"""T5Gemma (Zhang et al., arXiv:2504.06225): Gemma 2's layers as an encoder, whose windows are on both sides of a token,
and as a decoder with cross-attention. Each has a config and an embedding of its own."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo.layers.encoders.bidirectional_attention import BidirectionalAttention
from zoo.models.hf import grammar as hf

from . import gemma2, llama


def _read_stacks(config: hf.Config) -> tuple[hf.Config, hf.Config]:
    """Read the configs of the encoder and of the decoder. A source is as wide as the encoder, whatever the decoder's
    table says.

    **Raises** `ConfigError` for a vocabulary that is not the decoder's.
    """
    encoder = hf.read_config(_STACK, config["encoder"], ignore=None)
    decoder = hf.read_config(_STACK, hf.omit(config["decoder"], "cross_attention_hidden_size"), ignore=None)
    vocab = config["vocab_size"]
    if vocab not in (None, decoder["vocab_size"]):
        raise hf.ConfigError(f"vocab_size = {vocab}, and the decoder's is {decoder['vocab_size']}")
    return encoder, hf.Config(decoder, tie_word_embeddings=config["tie_word_embeddings"])


def _make_layers(config: hf.Config, windows: Sequence[int | None], **options: Any) -> list[hf.LayerFactories]:
    scores = gemma2.read_score_options(config)
    mixers = hf.make_windowed_attention_factories(config, windows, **scores, **options)
    ffn = hf.make_gated_mlp_factory(config)
    return [(mixer, ffn) for mixer in mixers]


def _build_t5gemma(config: hf.Config, *, key: Key[Array, ""]) -> hf.EncoderDecoder:
    own, other = _read_stacks(config)
    encoder_key, decoder_key = jax.random.split(key)
    norm = hf.make_rms_norm_factory(own, offset=1.0)
    # sliding_window tokens on each side, where `window` counts the token itself
    windows = [None if window is None else window + 1 for window in gemma2.read_windows(own)]
    encoder = hf.build_source_encoder(
        own,
        _make_layers(own, windows, attention=BidirectionalAttention),
        norm,
        final_norm=norm,
        block=hf.make_sandwich_block(norm),
        multiplier=own["hidden_size"] ** 0.5,
        key=encoder_key,
    )
    norm = hf.make_rms_norm_factory(other, offset=1.0)
    scores = gemma2.read_score_options(other)

    def make_block(**parts: Any) -> hf.SandwichCrossBlock:
        return hf.SandwichCrossBlock(mixer_post_norm=norm(), cross_post_norm=norm(), ffn_post_norm=norm(), **parts)

    decoder = hf.build_target_decoder(
        other,
        _make_layers(other, gemma2.read_windows(other)),
        norm,
        hf.make_cross_attention_factory(other, source_embed=own["hidden_size"], **scores),
        block=make_block,
        multiplier=other["hidden_size"] ** 0.5,
        soft_cap=other["final_logit_softcapping"],
        key=decoder_key,
    )
    return hf.EncoderDecoder(encoder, decoder, start=(other["bos_token_id"],))


def _map_t5gemma_names(config: hf.Config) -> hf.NameMap:
    norms = {
        "pre_self_attn_layernorm": "mixer_norm",
        "post_self_attn_layernorm": "mixer_post_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "ffn_post_norm",
        **hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES),
    }
    blocks: dict[str, hf.NameMap] = {
        "encoder": hf.prefixed("self_attn", "bidirectional_attention", llama.ATTENTION_NAMES),
        "decoder": {
            **hf.prefixed("self_attn", "attention", llama.ATTENTION_NAMES),
            **hf.prefixed("cross_attn", "cross_attention", llama.ATTENTION_NAMES),
            "pre_cross_attn_layernorm": "cross_norm",
            "post_cross_attn_layernorm": "cross_post_norm",
        },
    }
    names: dict[str, Any] = {"lm_head.out_proj": "decoder.head"}
    for stack, block in blocks.items():
        layers = hf.prefixed("layers.*", "layers.*", {**norms, **block})
        names |= hf.prefixed(f"model.{stack}", stack, {"embed_tokens": "embedding", "norm": "norm", **layers})
    return names


_STACK = dataclasses.replace(
    gemma2.GEMMA2,
    name="a stack of t5gemma",
    defaults={**hf.omit(gemma2.GEMMA2.declared, "tie_word_embeddings"), "bos_token_id": hf.non_negative(2)},
    ignored_keys=frozenset({"dropout_rate", "tie_word_embeddings"}),
)
"""The tables `encoder` and `decoder`, each read as a config of its own."""
_TABLE = hf.Default({}, hf.ValueKind("a table", lambda value: isinstance(value, Mapping)))

T5GEMMA = hf.Family(
    name="t5gemma",
    architecture="T5GemmaForConditionalGeneration",
    build=_build_t5gemma,
    names=_map_t5gemma_names,
    defaults={"encoder": _TABLE, "decoder": _TABLE, "tie_word_embeddings": True, "vocab_size": hf.optional_count()},
    required_values={"is_encoder_decoder": (True,)},
    ignored_keys=frozenset({"classifier_dropout_rate", "dropout_rate"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    head="lm_head.out_proj",
    embedding="model.decoder.embed_tokens",
)
