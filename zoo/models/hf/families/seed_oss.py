"""Seed-OSS (ByteDance Seed, "Seed-OSS Open-Source Models", 2025): LLaMA's layer with QKV biases."""

from jaxtyping import Array, Key

from zoo.models.decoder import Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    make_attention_factory,
    make_gated_mlp_factory,
    make_rms_norm_factory,
)
from zoo.models.hf.kinds import optional_count
from zoo.models.hf.spec import Config, Family

from . import llama


def _build_seed_oss(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm = make_rms_norm_factory(config)
    mixer = make_attention_factory(config, bias=config["attention_bias"], out_bias=config["attention_out_bias"])
    layers = [(mixer, make_gated_mlp_factory(config, bias=config["mlp_bias"]))] * config["num_hidden_layers"]
    return build_config_decoder(config, layers, norm, key=key)


SEED_OSS = Family(
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
        "num_key_value_heads": optional_count(8),
        "head_dim": optional_count(128),
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
    },
    ignored_keys=frozenset({"residual_dropout"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
