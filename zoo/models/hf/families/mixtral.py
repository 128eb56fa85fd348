"""Mixtral (Jiang et al., arXiv:2401.04088): Mistral's layer with a mixture of experts, routed by renormalized softmax
scores."""

from jaxtyping import Array, Key

from zoo.layers import SoftmaxRouter
from zoo.models.decoder import Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    make_attention_factory,
    make_mixture_factory,
    make_rms_norm_factory,
)
from zoo.models.hf.kinds import optional_non_negative
from zoo.models.hf.spec import Config, Family, NameMap, prefixed

from ..describe import describe_mixture
from . import llama, mistral

EXPERT_NAMES: NameMap = {"w1": "gate", "w3": "up", "w2": "down"}


def _build_mixtral(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm = make_rms_norm_factory(config)
    mixer = make_attention_factory(config, window=config["sliding_window"])
    experts = make_mixture_factory(config, SoftmaxRouter, config["num_experts"])
    return build_config_decoder(config, [(mixer, experts)] * config["num_hidden_layers"], norm, key=key)


def map_mixtral_names(config: Config) -> NameMap:
    mixture = {"gate": "router.scores", **prefixed("experts.*", "experts.*", EXPERT_NAMES)}
    return llama.map_llama_layers(prefixed("block_sparse_moe", "mixture_of_experts", mixture))


def map_mixtral_memory_names(config: Config) -> NameMap:
    mixture = {"gate": "router.scores", **prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES)}
    return llama.map_llama_layers(prefixed("mlp", "mixture_of_experts", mixture))


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    build=_build_mixtral,
    names=map_mixtral_names,
    defaults={
        **mistral.DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000000.0},
        "sliding_window": optional_non_negative(),
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    aliases={"num_local_experts": "num_experts"},
    required_values=mistral.MISTRAL.required_values,
    ignored_keys=frozenset({"router_jitter_noise"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=map_mixtral_memory_names,
    describe=describe_mixture,
)
