"""InternLM 3 (Shanghai AI Laboratory, "InternLM3-8B-Instruct", 2025): LLaMA's layer, with one option for biases of
queries, keys and values, and one for biases of all other matrices."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama


def _build_internlm3(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_rms_norm_factory(config)
    bias = config["mlp_bias"]
    mixer = hf.make_attention_factory(config, bias=config["attention_bias"], out_bias=bias)
    layers = [(mixer, hf.make_gated_mlp_factory(config, bias=bias))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, norm, key=key)


INTERNLM3 = hf.Family(
    name="internlm3",
    architecture="LlamaForCausalLM",
    build=_build_internlm3,
    names=llama.map_llama_names,
    defaults={
        **llama.DEFAULTS,
        "vocab_size": 128512,
        "intermediate_size": 10240,
        "num_hidden_layers": 48,
        "num_key_value_heads": hf.optional_count(2),
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
