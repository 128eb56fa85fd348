"""Mixtral (Jiang et al., arXiv:2401.04088): Mistral's layer with a mixture of experts, routed by renormalized softmax
scores."""

from jaxtyping import Array, Key

from zoo.layers import SoftmaxRouter
from zoo.models.hf import grammar as hf

from . import llama, mistral

EXPERT_NAMES: hf.NameMap = {"w1": "gate", "w3": "up", "w2": "down"}


def _build_mixtral(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_rms_norm_factory(config)
    mixer = hf.make_attention_factory(config, window=config["sliding_window"])
    experts = hf.make_mixture_factory(config, SoftmaxRouter, config["num_experts"])
    return hf.build_config_decoder(config, [(mixer, experts)] * config["num_hidden_layers"], norm, key=key)


def map_mixtral_names(config: hf.Config) -> hf.NameMap:
    mixture = {"gate": "router.scores", **hf.prefixed("experts.*", "experts.*", EXPERT_NAMES)}
    return llama.map_llama_layers(hf.prefixed("block_sparse_moe", "mixture_of_experts", mixture))


def map_mixtral_memory_names(config: hf.Config) -> hf.NameMap:
    mixture = {"gate": "router.scores", **hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES)}
    return llama.map_llama_layers(hf.prefixed("mlp", "mixture_of_experts", mixture))


MIXTRAL = hf.Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    build=_build_mixtral,
    names=map_mixtral_names,
    defaults={
        **mistral.DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000000.0},
        "sliding_window": hf.optional_non_negative(),
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    aliases={"num_local_experts": "num_experts"},
    required_values=mistral.MISTRAL.required_values,
    ignored_keys=frozenset({"router_jitter_noise"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=map_mixtral_memory_names,
    describe=hf.describe_mixture,
)
