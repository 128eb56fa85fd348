"""SigLIP's vision tower (Zhai et al., arXiv:2303.15343): a vision Transformer without a class token, whose tokens an
attention pooling head reads."""

from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers.encoders.pooling import AttentionPooler
from zoo.models.hf import grammar as hf


def _build_siglip(config: hf.Config, *, key: Key[Array, ""]) -> hf.ImageEncoder:
    return build_siglip_vision(config, hf.make_image_embedding_factory(config, class_token=False), key=key)


def build_siglip_vision(config: hf.Config, embedding: Any, *, key: Key[Array, ""]) -> hf.ImageEncoder:
    """Build the tower on the embedding of a factory."""
    norm = hf.make_layer_norm_factory(config)
    embed = config["hidden_size"]
    heads = config["num_attention_heads"]
    options = {"norm": norm, "activation": hf.find_activation(config)}
    pooler = None
    if config["vision_use_head"]:
        pooler = partial(AttentionPooler, embed, heads, config["intermediate_size"], **options)
    features = hf.make_feature_head_factory(pooler)
    layer = (
        hf.make_bidirectional_attention_factory(config, bias=True, out_bias=True),
        hf.make_mlp_factory(config),
    )
    head = hf.select_head(config, {"SiglipVisionModel": features})
    return hf.build_config_image_encoder(config, layer, norm, head, embedding, key=key)


def map_layers(mixer: str) -> hf.NameMap:
    """Map the tensors of the layers of a tower of CLIP or SigLIP, with a mixer that has this name here."""
    attention = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
    block = {
        "layer_norm1": "mixer_norm",
        "layer_norm2": "ffn_norm",
        **hf.prefixed("self_attn", mixer, attention),
        **hf.prefixed("mlp", "mlp", _MLP_NAMES),
    }
    return hf.prefixed("encoder.layers.*", "layers.*", block)


_MLP_NAMES = {"fc1": "up", "fc2": "down"}


def _map_siglip_names(config: hf.Config) -> hf.NameMap:
    parts = ("query", "key", "value")
    pooler = {
        "probe": hf.TensorMapping(("probe",), leading_ones=2),
        "attention.in_proj_weight": hf.fused(*(f"{part}.weight" for part in parts)),
        "attention.in_proj_bias": hf.fused(*(f"{part}.bias" for part in parts)),
        "attention.out_proj": "out",
        "layernorm": "norm",
        **hf.prefixed("mlp", "", _MLP_NAMES),
    }
    shell = {
        "embeddings.patch_embedding": "embedding.patches",
        "embeddings.position_embedding": "embedding.positions",
        **map_layers("bidirectional_attention"),
        "post_layernorm": "norm",
        **hf.prefixed("head", "head.pooler", pooler),
    }
    return hf.prefixed("vision_model", "", shell)


SIGLIP_VISION_MODEL = hf.Family(
    name="siglip_vision_model",
    architecture="SiglipVisionModel",
    build=_build_siglip,
    names=_map_siglip_names,
    defaults={
        **hf.omit(hf.VISION_DEFAULTS, *hf.LABEL_KEYS),
        "intermediate_size": 3072,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "vision_use_head": True,
    },
    required_values=hf.ONLY_BIDIRECTIONAL,
    ignored_keys=frozenset({"projection_dim", "num_image_tokens", "num_positions", "projector_hidden_act"}),
    ignored_tensors=(r"embeddings\.position_ids$",),
)
