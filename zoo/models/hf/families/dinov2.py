"""DINOv2 (Oquab et al., arXiv:2304.07193): a vision Transformer with layer scale; its classifier reads the class token
and the mean of the patches."""

from jaxtyping import Array, Key

from zoo.layers import ClassTokenPooler
from zoo.models.encoders.heads import join_class_and_mean
from zoo.models.encoders.image import ImageEncoder
from zoo.models.hf.builders import (
    make_bidirectional_attention_factory,
    make_gated_mlp_factory,
    make_layer_norm_factory,
    make_mlp_factory,
)
from zoo.models.hf.kinds import SIZE, Default, optional_count
from zoo.models.hf.spec import Config, Family, NameMap, TensorMapping, fused, prefixed

from .. import encoder_heads, vision
from . import llama, vit


def _build_dinov2(config: Config, *, key: Key[Array, ""]) -> ImageEncoder:
    classifier = vision.make_classification_head_factory(config, pool=join_class_and_mean, parts=2)
    features = encoder_heads.make_feature_head_factory(lambda key: ClassTokenPooler())
    heads = {"Dinov2ForImageClassification": classifier, "Dinov2Model": features}
    width = config["hidden_size"] * config["mlp_ratio"]
    if config["use_swiglu_ffn"]:  # two thirds of the width for each of the three matrices, in multiples of 8
        config_of_ffn = Config(config, intermediate_size=-(-(width * 2 // 3) // 8) * 8, hidden_act="silu")
        ffn = make_gated_mlp_factory(config_of_ffn, bias=True)
    else:
        ffn = make_mlp_factory(Config(config, intermediate_size=width))
    layer = (
        make_bidirectional_attention_factory(config, bias=config["qkv_bias"], out_bias=True),
        ffn,
    )
    embedding = vision.make_image_embedding_factory(config, mask_token=config["use_mask_token"])
    norm = make_layer_norm_factory(config)
    head = encoder_heads.select_head(config, heads)
    options = {"block": vision.make_layer_scale_block(config), "key": key}
    return vision.build_config_image_encoder(config, layer, norm, head, embedding, **options)


LAYER_SCALE_NAMES: NameMap = {"layer_scale1.lambda1": "mixer_scale", "layer_scale2.lambda1": "ffn_scale"}


def _map_dinov2_names(config: Config, attention: NameMap = vit.ATTENTION_NAMES) -> NameMap:
    block = {
        "norm1": "mixer_norm",
        "norm2": "ffn_norm",
        **LAYER_SCALE_NAMES,
        **prefixed("attention", "bidirectional_attention", attention),
        **prefixed("mlp", "mlp", {"fc1": "up", "fc2": "down"}),
        **prefixed("mlp", "gated_mlp", {"weights_in": fused("gate", "up"), "weights_out": "down"}),
    }
    shell = {
        **vit.CLASS_AND_POSITIONS,
        "embeddings.mask_token": TensorMapping(("embedding.mask_token",), leading_ones=1),
        **prefixed("encoder.layer.*", "layers.*", block),
        "layernorm": "norm",
    }
    return {**prefixed("dinov2", "", shell), "classifier": "head.linear"}


def _map_dinov2_memory_names(config: Config) -> NameMap:
    return _map_dinov2_names(config, llama.ATTENTION_NAMES)


DINOV2 = Family(
    name="dinov2",
    architecture="Dinov2ForImageClassification",
    build=_build_dinov2,
    names=_map_dinov2_names,
    defaults={
        **vision.VISION_DEFAULTS,
        "patch_size": Default(14, SIZE),
        "head_dim": optional_count(),
        "layer_norm_eps": 1e-6,
        "mlp_ratio": 4,
        "qkv_bias": True,
        "use_swiglu_ffn": False,
        "use_mask_token": True,
    },
    required_values=vision.ONLY_BIDIRECTIONAL,
    ignored_keys=vision.BACKBONE_KEYS | {"layerscale_value", "drop_path_rate"},
    memory_names=_map_dinov2_memory_names,
)
