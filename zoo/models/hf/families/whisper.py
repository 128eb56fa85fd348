"""Whisper (Radford et al., arXiv:2212.04356): log-mel features through two convolutions and an encoder, and a decoder
of text; norms before the sublayers, keys without bias."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Key

from zoo.layers import LayerNorm
from zoo.layers.encoders.frames import AudioEmbedding
from zoo.models.encoders.audio import build_audio_encoder
from zoo.models.hf import grammar as hf

from . import bart


def _drop_key_bias(make: Callable[..., Any], *, key: Key[Array, ""]) -> Any:
    """Make attention without the bias of its keys, which changes no softmax."""
    return eqx.tree_at(lambda attention: attention.key.bias, make(key=key), None)


def _build_whisper(config: hf.Config, *, key: Key[Array, ""]) -> hf.EncoderDecoder:
    encoder_key, decoder_key = jax.random.split(key)
    embed = config["hidden_size"]
    attention = partial(_drop_key_bias, hf.make_bidirectional_attention_factory(config, **bart.BIASES))
    encoder = build_audio_encoder(
        embedding=partial(AudioEmbedding, config["num_mel_bins"], embed, config["max_source_positions"]),
        layers=[(attention, hf.make_mlp_factory(config))] * config["num_hidden_layers"],
        norm=partial(LayerNorm, embed),
        key=encoder_key,
    )
    decoder = bart.build_bart_decoder(
        config,
        adapt=partial(partial, _drop_key_bias),
        block=hf.CrossBlock,
        positions=config["max_target_positions"],
        key=decoder_key,
    )
    return hf.EncoderDecoder(encoder, decoder, start=hf.read_start(config))


def _map_whisper_names(config: hf.Config) -> hf.NameMap:
    wiring = bart.Wiring(positions=0, norm_first=True, logits_bias=False)
    return {
        **hf.omit(bart.map_bart_names(config, wiring), "model.shared", "model.encoder.embed_positions"),
        "model.encoder.conv1": "encoder.embedding.first",
        "model.encoder.conv2": "encoder.embedding.second",
        "model.encoder.embed_positions.weight": "encoder.embedding.positions",
        "model.decoder.embed_tokens": "decoder.embedding",
    }


WHISPER = hf.Family(
    name="whisper",
    architecture="WhisperForConditionalGeneration",
    build=_build_whisper,
    names=_map_whisper_names,
    defaults={
        **hf.START_DEFAULTS,
        "decoder_start_token_id": hf.optional_non_negative(50257),
        "vocab_size": 51865,
        "num_mel_bins": 80,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "decoder_ffn_dim": 1536,
        "decoder_layers": 4,
        "decoder_attention_heads": 6,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "hidden_act": "gelu",
        "scale_embedding": False,
    },
    aliases=bart.ALIASES,
    required_values=bart.REQUIRED_VALUES,
    ignored_keys=frozenset(
        """
        activation_dropout dropout decoder_layerdrop encoder_layerdrop init_std apply_spec_augment mask_time_prob
        mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length mask_feature_min_masks
        median_filter_width use_weighted_layer_sum classifier_proj_size alignment_heads forced_decoder_ids lang_ids
        """.split()
    ),
    head="proj_out",
    embedding="model.decoder.embed_tokens",
)
