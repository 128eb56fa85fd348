"""SigLIP's vision tower (Zhai et al., arXiv:2303.15343): a vision Transformer without a class token, whose tokens an
attention pooling head reads."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import AttentionPooler
from zoo.models.encoders.image import ImageEncoder
from zoo.models.hf.builders import (
    find_activation,
    make_bidirectional_attention_factory,
    make_layer_norm_factory,
    make_mlp_factory,
)
from zoo.models.hf.spec import Config, Family, NameMap, TensorMapping, fused, prefixed

from .. import encoder_heads, vision


def _build_siglip(config: Config, *, key: Key[Array, ""]) -> ImageEncoder:
    norm = make_layer_norm_factory(config)
    embed = config["hidden_size"]
    heads = config["num_attention_heads"]
    options = {"norm": norm, "activation": find_activation(config)}
    pooler = None
    if config["vision_use_head"]:
        pooler = partial(AttentionPooler, embed, heads, config["intermediate_size"], **options)
    features = encoder_heads.make_feature_head_factory(pooler)
    layer = (
        make_bidirectional_attention_factory(config, bias=True, out_bias=True),
        make_mlp_factory(config),
    )
    embedding = vision.make_image_embedding_factory(config, class_token=False)
    head = encoder_heads.select_head(config, {"SiglipVisionModel": features})
    return vision.build_config_image_encoder(config, layer, norm, head, embedding, key=key)


def _map_siglip_names(config: Config) -> NameMap:
    attention = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
    mlp = {"fc1": "up", "fc2": "down"}
    block = {
        "layer_norm1": "mixer_norm",
        "layer_norm2": "ffn_norm",
        **prefixed("self_attn", "bidirectional_attention", attention),
        **prefixed("mlp", "mlp", mlp),
    }
    parts = ("query", "key", "value")
    pooler = {
        "probe": TensorMapping(("probe",), leading_ones=2),
        "attention.in_proj_weight": fused(*(f"{part}.weight" for part in parts)),
        "attention.in_proj_bias": fused(*(f"{part}.bias" for part in parts)),
        "attention.out_proj": "out",
        "layernorm": "norm",
        **prefixed("mlp", "", mlp),
    }
    shell = {
        "embeddings.patch_embedding": "embedding.patches",
        "embeddings.position_embedding": "embedding.positions",
        **prefixed("encoder.layers.*", "layers.*", block),
        "post_layernorm": "norm",
        **prefixed("head", "head.pooler", pooler),
    }
    return prefixed("vision_model", "", shell)


SIGLIP_VISION_MODEL = Family(
    name="siglip_vision_model",
    architecture="SiglipVisionModel",
    build=_build_siglip,
    names=_map_siglip_names,
    defaults={
        **{key: value for key, value in vision.VISION_DEFAULTS.items() if key not in encoder_heads.LABEL_KEYS},
        "intermediate_size": 3072,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "vision_use_head": True,
    },
    required_values=vision.ONLY_BIDIRECTIONAL,
    ignored_tensors=(r"embeddings\.position_ids$",),
)
