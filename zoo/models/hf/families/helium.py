"""Helium (Kyutai, "Helium 1", 2025): LLaMA's layer with interleaved RoPE."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama


def _build_helium(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_rms_norm_factory(config)
    rotary = hf.build_rotary(config, interleaved=True)
    mixer = hf.make_attention_factory(config, rotary=rotary, bias=config["attention_bias"])
    layers = [(mixer, hf.make_gated_mlp_factory(config, bias=config["mlp_bias"]))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, norm, key=key)


HELIUM = hf.Family(
    name="helium",
    architecture="HeliumForCausalLM",
    build=_build_helium,
    names=llama.map_llama_names,
    defaults={
        **llama.DEFAULTS,
        "vocab_size": 48000,
        "hidden_size": 2560,
        "intermediate_size": 7040,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": hf.optional_count(20),
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "rope_parameters": {"rope_theta": 100000.0},
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
