"""InternViT (Chen et al., arXiv:2312.14238, section 3.2), InternVL's tower: a vision Transformer with layer scale."""

from jaxtyping import Array, Key

from zoo.layers import IdentityNorm
from zoo.models.hf import grammar as hf


def _build_internvl_vision(config: hf.Config, *, key: Key[Array, ""]) -> hf.ImageEncoder:
    """**Raises** `ConfigError` for an unknown norm, and for a layer before a final norm that is not applied to it."""
    norms = {"layer_norm": hf.make_layer_norm_factory, "rms_norm": hf.make_rms_norm_factory}
    if config["norm_type"] not in norms:
        raise hf.ConfigError(f"norm_type = {config['norm_type']!r}, and norms are {', '.join(norms)}")
    if config["unread_layers"] and not config["use_mean_pooling"]:
        raise hf.ConfigError("use_mean_pooling = False is a norm of the last layer, and another one is read")
    norm = norms[config["norm_type"]](hf.Config(config, rms_norm_eps=config["layer_norm_eps"]))
    final_norm = IdentityNorm if config["use_mean_pooling"] else hf.make_layer_norm_factory(config)
    layer = (
        hf.make_bidirectional_attention_factory(config, bias=config["attention_bias"], out_bias=True),
        hf.make_mlp_factory(config),
    )
    has_positions = config["use_absolute_position_embeddings"]
    embedding = hf.make_image_embedding_factory(config, positions=has_positions, mask_token=config["use_mask_token"])
    options = {"block": hf.make_layer_scale_block(config), "final_norm": final_norm, "key": key}
    return hf.build_config_image_encoder(config, layer, norm, hf.make_feature_head_factory(None), embedding, **options)


def _map_internvl_vision_names(config: hf.Config) -> hf.NameMap:
    attention = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "projection_layer": "out"}
    block = {
        "layernorm_before": "mixer_norm",
        "layernorm_after": "ffn_norm",
        "lambda_1": "mixer_scale",
        "lambda_2": "ffn_scale",
        **hf.prefixed("attention", "bidirectional_attention", attention),
        **hf.prefixed("mlp", "mlp", {"fc1": "up", "fc2": "down"}),
    }
    return {
        "embeddings.cls_token": hf.TensorMapping(("embedding.class_token",), leading_ones=2),
        "embeddings.mask_token": hf.TensorMapping(("embedding.mask_token",), leading_ones=2),
        "embeddings.position_embeddings": hf.TensorMapping(("embedding.positions.weight",), leading_ones=1),
        "embeddings.patch_embeddings.projection": "embedding.patches",
        **hf.prefixed("encoder.layer.*", "layers.*", block),
        "layernorm": "norm",
    }


INTERNVL_VISION = hf.Family(
    name="internvl_vision",
    architecture="InternVLVisionModel",
    build=_build_internvl_vision,
    names=_map_internvl_vision_names,
    defaults={
        **hf.omit(hf.VISION_DEFAULTS, *hf.LABEL_KEYS),
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "image_size": hf.Default([448, 448], hf.SIZE),
        "patch_size": hf.Default([14, 14], hf.SIZE),
        "layer_norm_eps": 1e-6,
        "norm_type": "layer_norm",
        "attention_bias": False,
        "use_mask_token": False,
        "use_absolute_position_embeddings": True,
        "use_mean_pooling": True,
    },
    required_values={**hf.ONLY_BIDIRECTIONAL, "use_qk_norm": (False,)},
    ignored_keys=frozenset({"layer_scale_init_value", "projection_dropout"}),
)
