"""Helium (Kyutai, "Helium 1", 2025): LLaMA's layer with interleaved RoPE."""

from jaxtyping import Array, Key

from zoo.models.decoder import Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    build_rotary,
    make_attention_factory,
    make_gated_mlp_factory,
    make_rms_norm_factory,
)
from zoo.models.hf.kinds import optional_count
from zoo.models.hf.spec import Config, Family

from . import llama


def _build_helium(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm = make_rms_norm_factory(config)
    rotary = build_rotary(config, interleaved=True)
    mixer = make_attention_factory(config, rotary=rotary, bias=config["attention_bias"])
    layers = [(mixer, make_gated_mlp_factory(config, bias=config["mlp_bias"]))] * config["num_hidden_layers"]
    return build_config_decoder(config, layers, norm, key=key)


HELIUM = Family(
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
        "num_key_value_heads": optional_count(20),
        "head_dim": optional_count(128),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "rope_parameters": {"rope_theta": 100000.0},
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
