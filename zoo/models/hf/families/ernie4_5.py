"""ERNIE 4.5, dense (Baidu, "ERNIE 4.5 Technical Report", 2025): LLaMA's layer with interleaved RoPE."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama


def _build_ernie4_5(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_rms_norm_factory(config)
    bias = config["use_bias"]
    mixer = hf.make_attention_factory(
        config, rotary=hf.build_rotary(config, interleaved=True), bias=bias, out_bias=bias
    )
    layers = [(mixer, hf.make_gated_mlp_factory(config, bias=bias))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, norm, key=key)


ERNIE4_5 = hf.Family(
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    build=_build_ernie4_5,
    names=llama.map_llama_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "attention_bias", "mlp_bias"),
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": hf.optional_count(2),
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 500000.0},
        "use_bias": False,
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
