"""DINOv2 (Oquab et al., arXiv:2304.07193): a vision Transformer with layer scale; its classifier reads the class token
and the mean of the patches."""

from jaxtyping import Array, Key

from zoo.layers.encoders.pooling import ClassTokenPooler
from zoo.models.hf import grammar as hf

from . import llama, vit


def _build_dinov2(config: hf.Config, *, key: Key[Array, ""]) -> hf.ImageEncoder:
    classifier = hf.make_classification_head_factory(config, pool=hf.join_class_and_mean, parts=2)
    features = hf.make_feature_head_factory(lambda key: ClassTokenPooler())
    heads = {"Dinov2ForImageClassification": classifier, "Dinov2Model": features}
    width = config["hidden_size"] * config["mlp_ratio"]
    if config["use_swiglu_ffn"]:  # two thirds of the width for each of the three matrices, in multiples of 8
        config_of_ffn = hf.Config(config, intermediate_size=-(-(width * 2 // 3) // 8) * 8, hidden_act="silu")
        ffn = hf.make_gated_mlp_factory(config_of_ffn, bias=True)
    else:
        ffn = hf.make_mlp_factory(hf.Config(config, intermediate_size=width))
    layer = (
        hf.make_bidirectional_attention_factory(config, bias=config["qkv_bias"], out_bias=True),
        ffn,
    )
    embedding = hf.make_image_embedding_factory(config, mask_token=config["use_mask_token"])
    norm = hf.make_layer_norm_factory(config)
    head = hf.select_head(config, heads)
    options = {"block": hf.make_layer_scale_block(config), "key": key}
    return hf.build_config_image_encoder(config, layer, norm, head, embedding, **options)


LAYER_SCALE_NAMES: hf.NameMap = {"layer_scale1.lambda1": "mixer_scale", "layer_scale2.lambda1": "ffn_scale"}


def _map_dinov2_names(config: hf.Config, attention: hf.NameMap = vit.ATTENTION_NAMES) -> hf.NameMap:
    block = {
        "norm1": "mixer_norm",
        "norm2": "ffn_norm",
        **LAYER_SCALE_NAMES,
        **hf.prefixed("attention", "bidirectional_attention", attention),
        **hf.prefixed("mlp", "mlp", {"fc1": "up", "fc2": "down"}),
        **hf.prefixed("mlp", "gated_mlp", {"weights_in": hf.fused("gate", "up"), "weights_out": "down"}),
    }
    shell = {
        **vit.CLASS_AND_POSITIONS,
        "embeddings.mask_token": hf.TensorMapping(("embedding.mask_token",), leading_ones=1),
        **hf.prefixed("encoder.layer.*", "layers.*", block),
        "layernorm": "norm",
    }
    return {**hf.prefixed("dinov2", "", shell), "classifier": "head.linear"}


def _map_dinov2_memory_names(config: hf.Config) -> hf.NameMap:
    return _map_dinov2_names(config, llama.ATTENTION_NAMES)


DINOV2 = hf.Family(
    name="dinov2",
    architecture="Dinov2ForImageClassification",
    build=_build_dinov2,
    names=_map_dinov2_names,
    defaults={
        **hf.VISION_DEFAULTS,
        "patch_size": hf.Default(14, hf.SIZE),
        "head_dim": hf.optional_count(),
        "layer_norm_eps": 1e-6,
        "mlp_ratio": 4,
        "qkv_bias": True,
        "use_swiglu_ffn": False,
        "use_mask_token": True,
    },
    required_values=hf.ONLY_BIDIRECTIONAL,
    ignored_keys=hf.BACKBONE_KEYS | {"layerscale_value", "drop_path_rate"},
    memory_names=_map_dinov2_memory_names,
)
