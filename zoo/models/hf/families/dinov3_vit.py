"""DINOv3 (Siméoni et al., arXiv:2508.10104): a vision Transformer with two-dimensional RoPE, register tokens, layer
scale, and no bias of keys."""

from typing import Any

import equinox as eqx
from jaxtyping import Array, Key

from zoo.layers.encoders.bidirectional_attention import BidirectionalAttention
from zoo.layers.encoders.pooling import ClassTokenPooler
from zoo.models.hf import grammar as hf
from zoo.ops.axial_rotary import AxialRotary

from . import dinov2, llama


def _build_dinov3(config: hf.Config, *, key: Key[Array, ""]) -> hf.ImageEncoder:
    head_dim = hf.read_head_sizes(config)[2]
    if head_dim % 4:
        raise hf.ConfigError(
            f"heads of {head_dim} features: pairs of them turn by row and by column, so 4 divides them"
        )
    without = [name for name in ("query", "key", "value") if not config[f"{name}_bias"]]
    options: dict[str, Any] = {"rotary": AxialRotary(head_dim, config["rope_theta"]), "bias": True}
    make_attention = hf.make_bidirectional_attention_factory(config, out_bias=config["proj_bias"], **options)

    def make_mixer(key: Key[Array, ""]) -> BidirectionalAttention:
        biases = lambda attention: [getattr(attention, name).bias for name in without]
        return eqx.tree_at(biases, make_attention(key=key), [None] * len(without))

    bias = config["mlp_bias"]
    registers = config["num_register_tokens"]
    make_ffn = hf.make_gated_mlp_factory if config["use_gated_mlp"] else hf.make_mlp_factory
    embedding = hf.make_image_embedding_factory(config, positions=False, registers=registers, mask_token=True)
    features = hf.make_feature_head_factory(lambda key: ClassTokenPooler())
    head = hf.select_head(config, {"DINOv3ViTModel": features})
    layer = (make_mixer, make_ffn(config, bias=bias))
    norm = hf.make_layer_norm_factory(config)
    block = hf.make_layer_scale_block(config)
    return hf.build_config_image_encoder(config, layer, norm, head, embedding, block=block, key=key)


def _map_dinov3_names(config: hf.Config) -> hf.NameMap:
    mlp = "gated_mlp" if config["use_gated_mlp"] else "mlp"
    block = {
        "norm1": "mixer_norm",
        "norm2": "ffn_norm",
        **dinov2.LAYER_SCALE_NAMES,
        **hf.prefixed("attention", "bidirectional_attention", llama.ATTENTION_NAMES),
        **hf.prefixed("mlp", mlp, llama.GATED_MLP_NAMES),
    }
    embedding = {
        "cls_token": hf.TensorMapping(("embedding.class_token",), leading_ones=2),
        "mask_token": hf.TensorMapping(("embedding.mask_token",), leading_ones=2),
        "register_tokens": hf.TensorMapping(("embedding.register_tokens",), leading_ones=1),
        "patch_embeddings": "embedding.patches",
    }
    return {**hf.prefixed("embeddings", "", embedding), **hf.prefixed("layer.*", "layers.*", block), "norm": "norm"}


DINOV3_VIT = hf.Family(
    name="dinov3_vit",
    architecture="DINOv3ViTModel",
    build=_build_dinov3,
    names=_map_dinov3_names,
    defaults={
        **hf.omit(hf.VISION_DEFAULTS, *hf.LABEL_KEYS, "image_size"),
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_attention_heads": 6,
        "layer_norm_eps": 1e-5,
        "rope_theta": 100.0,
        **dict.fromkeys(("query_bias", "value_bias", "proj_bias", "mlp_bias"), True),
        "key_bias": False,
        "use_gated_mlp": False,
        "num_register_tokens": hf.non_negative(0),
    },
    required_values=hf.ONLY_BIDIRECTIONAL,
    ignored_keys=hf.BACKBONE_KEYS
    | {"image_size", "layerscale_value", "drop_path_rate", "pos_embed_jitter", "pos_embed_rescale", "pos_embed_shift"},
    memory_modules={"model.layer": "layer"},
)
