"""CLIP's encoder of images (Radford et al., arXiv:2103.00020): a vision Transformer with a norm before its first layer,
and one of the class token after the last."""

from jaxtyping import Array, Key

from zoo.layers import IdentityNorm
from zoo.layers.encoders.pooling import ClassTokenPooler
from zoo.models.hf import grammar as hf

from . import siglip_vision_model


def _build_clip_vision(config: hf.Config, *, key: Key[Array, ""]) -> hf.ImageEncoder:
    norm = hf.make_layer_norm_factory(config)
    layer = (
        hf.make_bidirectional_attention_factory(config, bias=True, out_bias=True),
        hf.make_mlp_factory(config),
    )
    embedding = hf.make_image_embedding_factory(config, bias=False, scale=config["hidden_size"] ** -0.5)
    heads = {"CLIPVisionModel": hf.make_feature_head_factory(lambda key: ClassTokenPooler(norm()))}
    norms = {"embedding_norm": norm, "final_norm": IdentityNorm}
    return hf.build_config_image_encoder(
        config, layer, norm, hf.select_head(config, heads), embedding, key=key, **norms
    )


def _map_clip_vision_names(config: hf.Config) -> hf.NameMap:
    shell = {
        "embeddings.class_embedding": "embedding.class_token",
        "embeddings.patch_embedding": "embedding.patches",
        "embeddings.position_embedding": "embedding.positions",
        "pre_layrnorm": "embedding_norm",
        **siglip_vision_model.map_layers("bidirectional_attention"),
        "post_layernorm": "head.pooler.norm",
    }
    return hf.prefixed("vision_model", "", shell)


CLIP_VISION_MODEL = hf.Family(
    name="clip_vision_model",
    architecture="CLIPVisionModel",
    build=_build_clip_vision,
    names=_map_clip_vision_names,
    defaults={
        **hf.omit(hf.VISION_DEFAULTS, *hf.LABEL_KEYS),
        "intermediate_size": 3072,
        "hidden_act": "quick_gelu",
        "patch_size": hf.Default(32, hf.SIZE),
        "layer_norm_eps": 1e-5,
    },
    required_values=hf.ONLY_BIDIRECTIONAL,
    ignored_keys=frozenset({"projection_dim", "dropout", "tie_word_embeddings"}),
    ignored_tensors=(r"embeddings\.position_ids$",),
)
