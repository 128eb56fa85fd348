"""CLIP's encoder of texts (Radford et al., arXiv:2103.00020): causal pre-norm layers with learned positions, pooled at
the end token."""

from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers.encoders.pooling import EndTokenPooler
from zoo.models.hf import grammar as hf

from . import siglip_vision_model

HIGHEST_ID = 2
"""The `eos_token_id` of openai's files, which is not the end token's: texts are pooled at the highest id, which is."""


def _build_clip_text(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    end = config["eos_token_id"]
    if end == HIGHEST_ID:
        end = None
    mixer = hf.make_attention_factory(config, rotary=None, bias=True, out_bias=True)
    heads = {"Model": hf.make_feature_head_factory(lambda key: EndTokenPooler(end))}
    return build_text_layers(config, mixer, "CLIPText", heads, key=key)


def build_text_layers(
    config: hf.Config, mixer: hf.MixerFactory, prefix: str, heads: dict[str, hf.HeadFactory], *, key: Key[Array, ""]
) -> hf.Encoder:
    """Build an encoder of pre-norm layers with one of these heads, by what follows `prefix` in its architecture."""
    norm = hf.make_layer_norm_factory(config)
    layers: list[Any] = [(mixer, hf.make_mlp_factory(config))] * config["num_hidden_layers"]
    parts = {"norm": norm, "final_norm": norm, "block": hf.Block, "positions": config["max_position_embeddings"]}
    return hf.build_config_encoder(config, layers, prefix, heads, key=key, **parts)


def map_text_names(mixer: str, config: hf.Config) -> hf.NameMap:
    """Map the tensors of an encoder of texts, whose mixer has this name here."""
    shell = {
        "embeddings.token_embedding": "embedding",
        "embeddings.position_embedding": "position_embedding",
        **siglip_vision_model.map_layers(mixer),
        "final_layer_norm": "norm",
        "head": "head.pooler.linear",
    }
    return hf.prefixed("text_model", "", shell)


CLIP_TEXT_MODEL = hf.Family(
    name="clip_text_model",
    architecture="CLIPTextModel",
    build=_build_clip_text,
    names=partial(map_text_names, "attention"),
    defaults={
        **hf.omit(hf.HEAD_DEFAULTS, *hf.LABEL_KEYS),
        "vocab_size": 49408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "hidden_act": "quick_gelu",
        "max_position_embeddings": 77,
        "layer_norm_eps": 1e-5,
        "eos_token_id": hf.non_negative(49407),
    },
    ignored_keys=frozenset({"projection_dim", "dropout", "tie_word_embeddings"}),
    ignored_tensors=(r"embeddings\.position_ids$",),
)
