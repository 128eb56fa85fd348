"""Vision Transformer (Dosovitskiy et al., arXiv:2010.11929): learned positions, pre-norm layers, and a class token that
a classifier or a dense pooler reads."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import DensePooler
from zoo.models.hf.builders import find_activation, make_layer_norm_factory, make_mlp_factory
from zoo.models.hf.spec import Config, Family, NameMap, TensorMapping, prefixed
from zoo.models.image import ImageEncoder

from .. import vision


def _build_vit(config: Config, *, key: Key[Array, ""]) -> ImageEncoder:
    size, activation = config["hidden_size"], find_activation(config, "pooler_act")
    pooler = partial(DensePooler, size, config["pooler_output_size"] or size, activation=activation)
    heads = {
        "ViTForImageClassification": vision.make_classification_head_factory(config),
        "ViTModel": vision.make_feature_head_factory(pooler),
    }
    bias = config["qkv_bias"]
    layer = vision.make_bidirectional_attention_factory(config, bias=bias, out_bias=True), make_mlp_factory(config)
    embedding, head = vision.make_image_embedding_factory(config), vision.select_head(config, heads)
    return vision.build_config_image_encoder(config, layer, make_layer_norm_factory(config), head, embedding, key=key)


CLASS_AND_POSITIONS: NameMap = {
    "embeddings.cls_token": TensorMapping(("embedding.class_token",), leading_ones=2),
    "embeddings.position_embeddings": TensorMapping(("embedding.positions.weight",), leading_ones=1),
    "embeddings.patch_embeddings.projection": "embedding.patches",
}
ATTENTION_NAMES: NameMap = {
    **prefixed("attention", "", {name: name for name in ("query", "key", "value")}),
    "output.dense": "out",
}


def _map_vit_names(config: Config) -> NameMap:
    block = {
        "layernorm_before": "mixer_norm",
        "layernorm_after": "ffn_norm",
        **prefixed("attention", "bidirectional_attention", ATTENTION_NAMES),
        "intermediate.dense": "mlp.up",
        "output.dense": "mlp.down",
    }
    shell = {**CLASS_AND_POSITIONS, **prefixed("encoder.layer.*", "layers.*", block), "layernorm": "norm"}
    heads = {"pooler.dense": "head.pooler.linear"}
    return {**prefixed("vit", "", {**shell, **heads}), "classifier": "head.linear"}


VIT = Family(
    name="vit",
    architecture="ViTForImageClassification",
    build=_build_vit,
    names=_map_vit_names,
    defaults={
        **vision.VISION_DEFAULTS,
        "intermediate_size": 3072,
        "head_dim": None,
        "layer_norm_eps": 1e-12,
        "qkv_bias": True,
        "pooler_output_size": None,
        "pooler_act": "tanh",
    },
    required_values=vision.ONLY_BIDIRECTIONAL,
    ignored_keys=frozenset({"encoder_stride"}),
)
