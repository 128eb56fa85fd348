"""Seed-OSS (ByteDance Seed, "Seed-OSS Open-Source Models", 2025): LLaMA's layer with QKV biases."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama


def _build_seed_oss(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_rms_norm_factory(config)
    mixer = hf.make_attention_factory(config, bias=config["attention_bias"], out_bias=config["attention_out_bias"])
    layers = [(mixer, hf.make_gated_mlp_factory(config, bias=config["mlp_bias"]))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, norm, key=key)


SEED_OSS = hf.Family(
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    build=_build_seed_oss,
    names=llama.map_llama_names,
    defaults={
        **llama.DEFAULTS,
        "vocab_size": 155136,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": hf.optional_count(8),
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
    },
    ignored_keys=frozenset({"residual_dropout"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
