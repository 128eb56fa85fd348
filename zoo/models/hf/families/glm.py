"""GLM-4 (GLM team, arXiv:2406.12793): LLaMA's layer with interleaved RoPE on half of each head, QKV biases, and one
matrix for gate and up."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama, phi3


def _build_glm(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    return build_glm_layers(config, hf.Block, key=key)


def build_glm_layers(config: hf.Config, block: Callable[..., Any], *, key: Key[Array, ""]) -> hf.Decoder:
    """Build GLM's layers with this residual wiring."""
    mixer = hf.make_attention_factory(
        config, rotary=hf.build_rotary(config, interleaved=True), bias=config["attention_bias"], out_bias=False
    )
    layers = [(mixer, hf.make_gated_mlp_factory(config))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), block=block, key=key)


def _map_glm_names(config: hf.Config) -> hf.NameMap:
    return llama.map_llama_layers(phi3.map_fused_gated_mlp())


DEFAULTS = {
    **hf.omit(llama.DEFAULTS, "mlp_bias"),
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": hf.optional_count(2),
    "head_dim": hf.optional_count(128),
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "attention_bias": True,
}

GLM = hf.Family(
    name="glm",
    architecture="GlmForCausalLM",
    build=_build_glm,
    names=_map_glm_names,
    defaults=DEFAULTS,
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
