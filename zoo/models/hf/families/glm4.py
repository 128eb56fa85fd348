"""GLM-4-0414 (GLM team, "GLM-4-0414", 2025): GLM-4's layer with norms before and after each sublayer."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import glm, llama, phi3


def _build_glm4(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    return glm.build_glm_layers(config, hf.make_sandwich_block(hf.make_rms_norm_factory(config)), key=key)


def _map_glm4_names(config: hf.Config) -> hf.NameMap:
    norms = {
        "input_layernorm": "mixer_norm",
        "post_self_attn_layernorm": "mixer_post_norm",
        "post_attention_layernorm": "ffn_norm",
        "post_mlp_layernorm": "ffn_post_norm",
    }
    return llama.map_llama_layers(phi3.map_fused_gated_mlp(), norms=norms)


GLM4 = hf.Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    build=_build_glm4,
    names=_map_glm4_names,
    defaults=glm.DEFAULTS,
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
