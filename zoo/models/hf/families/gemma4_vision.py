"""Gemma 4's encoder of images (Gemma team, "Gemma 4", 2026): norms before and after each sublayer and of queries, keys
and values, two-dimensional RoPE in halves of each head, and learned positions of rows and columns."""

from functools import partial

import jax
from jaxtyping import Array, Key

from zoo.layers import IdentityNorm
from zoo.layers.encoders.packed_embedding import AxisPositions, PackedImageEmbedding
from zoo.models.hf import grammar as hf


def _build_gemma4_vision(config: hf.Config, *, key: Key[Array, ""]) -> hf.ImageEncoder:
    embed = config["hidden_size"]
    key, position_key = jax.random.split(key)
    norm = hf.make_rms_norm_factory(config)
    mixer = hf.make_bidirectional_attention_factory(
        config,
        rotary=hf.build_axial_rotary(config, halves=True),
        scale=1.0,
        qk_norm=hf.make_head_norm_factory(config),
        value_norm=hf.make_head_norm_factory(config, scaled=False),
    )
    positions = AxisPositions(config["position_embedding_size"], embed, key=position_key)
    options = {"positions": positions, "centered": True}
    return hf.build_image_encoder(
        embedding=partial(PackedImageEmbedding, 3 * config["patch_size"] ** 2, embed, **options),
        layers=[(mixer, hf.make_gated_mlp_factory(config))] * config["num_hidden_layers"],
        norm=norm,
        final_norm=IdentityNorm,
        block=hf.make_sandwich_block(norm),
        head=hf.make_feature_head_factory(),
        key=key,
    )


def _map_gemma4_vision_names(config: hf.Config) -> hf.NameMap:
    attention = {
        "q_proj.linear": "query",
        "k_proj.linear": "key",
        "v_proj.linear": "value",
        "o_proj.linear": "out",
        "q_norm": "query_norm",
        "k_norm": "key_norm",
    }
    layer = {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "mixer_post_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "ffn_post_norm",
        **hf.prefixed("self_attn", "bidirectional_attention", attention),
        **hf.prefixed("mlp", "gated_mlp", {f"{name}_proj.linear": name for name in ("gate", "up", "down")}),
    }
    embedder = {"input_proj": "patches", "position_embedding_table": "positions.weight"}
    return {
        **hf.prefixed("patch_embedder", "embedding", embedder),
        **hf.prefixed("encoder.layers.*", "layers.*", layer),
    }


GEMMA4_VISION = hf.Family(
    name="gemma4_vision",
    architecture="Gemma4VisionModel",
    build=_build_gemma4_vision,
    names=_map_gemma4_vision_names,
    defaults={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 10_240,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    },
    aliases={"hidden_activation": "hidden_act"},
    required_values={
        **hf.ONLY_BIDIRECTIONAL,
        "attention_bias": (False, None),
        "use_clipped_linears": (False,),
        "standardize": (False,),
    },
    ignored_keys=frozenset({"max_position_embeddings"}),
)
