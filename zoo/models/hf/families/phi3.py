"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al., arXiv:2404.14219; arXiv:2412.08905): LLaMA's layer with fused projections,
and LongRoPE for long contexts."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama


def _build_phi3(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    mixer = hf.make_attention_factory(config, window=config["sliding_window"])
    layers = [(mixer, hf.make_gated_mlp_factory(config))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key)


def _map_phi3_names(config: hf.Config) -> hf.NameMap:
    attention = {"qkv_proj": hf.fused("query", "key", "value"), "o_proj": "out"}
    return llama.map_llama_layers(map_fused_gated_mlp(), hf.prefixed("self_attn", "attention", attention))


def map_fused_gated_mlp() -> hf.NameMap:
    """Return the name map of a gated MLP with one matrix for gate and up."""
    return hf.prefixed("mlp", "gated_mlp", {"gate_up_proj": hf.fused("gate", "up"), "down_proj": "down"})


PHI3 = hf.Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    build=_build_phi3,
    names=_map_phi3_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "attention_bias", "mlp_bias"),
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        "sliding_window": hf.optional_non_negative(),
    },
    required_values={"attention_bias": (False,)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
