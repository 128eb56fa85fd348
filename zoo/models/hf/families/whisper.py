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


def _drop_key_bias(make: Callable[..., Any], *, key: Key[Array, ""]) -> Any:
    """Make attention without the bias of its keys, which changes no softmax."""
    return eqx.tree_at(lambda attention: attention.key.bias, make(key=key), None)


def _build_whisper(config: hf.Config, *, key: Key[Array, ""]) -> hf.EncoderDecoder:
    encoder_key, decoder_key = jax.random.split(key)
    embed = config["hidden_size"]
    own = hf.Config(
        config,
        num_hidden_layers=config["decoder_layers"],
        num_attention_heads=config["decoder_attention_heads"],
        intermediate_size=config["decoder_ffn_dim"],
        tie_word_embeddings=True,
    )
    norm = partial(LayerNorm, embed)
    biases: dict[str, Any] = {"bias": True, "out_bias": True}
    both_ways = partial(_drop_key_bias, hf.make_bidirectional_attention_factory(config, **biases))
    causal = partial(_drop_key_bias, hf.make_attention_factory(own, rotary=None, **biases))
    encoder = build_audio_encoder(
        embedding=partial(AudioEmbedding, config["num_mel_bins"], embed, config["max_source_positions"]),
        layers=[(both_ways, hf.make_mlp_factory(config))] * config["num_hidden_layers"],
        norm=norm,
        key=encoder_key,
    )
    decoder = hf.build_target_decoder(
        own,
        [(causal, hf.make_mlp_factory(own))] * own["num_hidden_layers"],
        norm,
        partial(_drop_key_bias, hf.make_cross_attention_factory(own, **biases)),
        block=hf.CrossBlock,
        positions=config["max_target_positions"],
        multiplier=embed**0.5 if config["scale_embedding"] else 1.0,
        key=decoder_key,
    )
    return hf.EncoderDecoder(encoder, decoder, start=hf.read_start(config))


def _map_whisper_names(config: hf.Config) -> hf.NameMap:
    attention = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
    block = {
        "self_attn_layer_norm": "mixer_norm",
        "final_layer_norm": "ffn_norm",
        "fc1": "mlp.up",
        "fc2": "mlp.down",
    }
    encoder = {
        "conv1": "embedding.first",
        "conv2": "embedding.second",
        "embed_positions.weight": "embedding.positions",
        "layer_norm": "norm",
        **hf.prefixed("layers.*", "layers.*", block),
        **hf.prefixed("layers.*.self_attn", "layers.*.bidirectional_attention", attention),
    }
    decoder = {
        "embed_tokens": "embedding",
        "embed_positions": "position_embedding",
        "layer_norm": "norm",
        **hf.prefixed("layers.*", "layers.*", {**block, "encoder_attn_layer_norm": "cross_norm"}),
        **hf.prefixed("layers.*.self_attn", "layers.*.attention", attention),
        **hf.prefixed("layers.*.encoder_attn", "layers.*.cross_attention", attention),
    }
    return {**hf.prefixed("model.encoder", "encoder", encoder), **hf.prefixed("model.decoder", "decoder", decoder)}


WHISPER = hf.Family(
    name="whisper",
    architecture="WhisperForConditionalGeneration",
    build=_build_whisper,
    names=_map_whisper_names,
    defaults={
        "decoder_start_token_id": hf.optional_non_negative(50257),
        "forced_bos_token_id": hf.optional_non_negative(),
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
    aliases={
        "d_model": "hidden_size",
        "encoder_ffn_dim": "intermediate_size",
        "encoder_layers": "num_hidden_layers",
        "encoder_attention_heads": "num_attention_heads",
        "activation_function": "hidden_act",
    },
    required_values={"is_encoder_decoder": (True,), "tie_word_embeddings": (True,)},
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
