"""Code World Model (FAIR CodeGen team, arXiv:2510.02387): LLaMA's layer; of four layers, the first attends to all
tokens, and three have a sliding window."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama


def _build_cwm(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    types = hf.read_layer_types(config, list_every_fourth_full(config))
    mixers = hf.make_windowed_attention_factories(
        config, hf.list_layer_windows(types, config["sliding_window"] or None)
    )
    ffn = hf.make_gated_mlp_factory(config, bias=config["mlp_bias"])
    norm = hf.make_rms_norm_factory(config)
    return hf.build_config_decoder(config, [(mixer, ffn) for mixer in mixers], norm, key=key)


def list_every_fourth_full(config: hf.Config) -> list[str]:
    """Return `layer_types` of which the first and every fourth after it is full attention."""
    return hf.list_layer_types(number % 4 for number in range(config["num_hidden_layers"]))


CWM = hf.Family(
    name="cwm",
    architecture="CwmForCausalLM",
    build=_build_cwm,
    names=llama.map_llama_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "attention_bias"),
        "vocab_size": 128256,
        "hidden_size": 6144,
        "intermediate_size": 21504,
        "num_hidden_layers": 64,
        "num_attention_heads": 48,
        "num_key_value_heads": hf.optional_count(8),
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_theta": 1000000.0,
            "rope_type": "llama3",
            "factor": 16.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "sliding_window": hf.optional_non_negative(8192),
        "layer_types": hf.optional_words(),
    },
    required_values={"attention_bias": (False,)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
