"""Pixtral's encoder of images (Agrawal et al., arXiv:2410.07073, section 2.2), with two-dimensional RoPE, and the
projector of Mistral Small 3.1."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import IdentityNorm, RMSNorm
from zoo.layers.encoders.packed_embedding import PackedImageEmbedding
from zoo.models.hf import grammar as hf

from . import llama


def _build_pixtral(config: hf.Config, *, key: Key[Array, ""]) -> hf.ImageEncoder:
    embed = config["hidden_size"]
    if config["head_dim"] not in (None, embed / config["num_attention_heads"]):
        raise hf.ConfigError(
            f"head_dim = {config['head_dim']}, and it is hidden_size = {embed} over "
            f"{config['num_attention_heads']} heads"
        )
    rotary = hf.build_axial_rotary(config, alternating=True)
    layer = (hf.make_bidirectional_attention_factory(config, rotary=rotary), hf.make_gated_mlp_factory(config))
    norm = partial(RMSNorm, embed, epsilon=1e-5)
    return hf.build_image_encoder(
        embedding=partial(PackedImageEmbedding, config["num_channels"] * config["patch_size"] ** 2, embed),
        layers=[layer] * config["num_hidden_layers"],
        norm=norm,
        embedding_norm=norm,
        final_norm=IdentityNorm,
        head=hf.make_feature_head_factory(),
        key=key,
    )


def _map_pixtral_names(config: hf.Config) -> hf.NameMap:
    side = config["patch_size"]
    layer = {
        "attention_norm": "mixer_norm",
        "ffn_norm": "ffn_norm",
        **hf.prefixed("attention", "bidirectional_attention", llama.ATTENTION_NAMES),
        **hf.prefixed("feed_forward", "gated_mlp", llama.GATED_MLP_NAMES),
    }
    return {
        "patch_conv": hf.TensorMapping(("embedding.patches",), in_dims=(config["num_channels"], side, side)),
        "ln_pre": "embedding_norm",
        **hf.prefixed("transformer.layers.*", "layers.*", layer),
    }


PIXTRAL_VISION = hf.Family(
    name="pixtral_vision",
    architecture="PixtralVisionModel",
    build=_build_pixtral,
    names=_map_pixtral_names,
    defaults={
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "head_dim": hf.optional_count(),
        "num_channels": 3,
        "patch_size": 16,
        "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10_000.0},
    },
    required_values=hf.ONLY_BIDIRECTIONAL,
    ignored_keys=frozenset({"image_size", "vocab_size"}),
)
