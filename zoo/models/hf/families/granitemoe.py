"""Granite's mixture of experts (Granite team, "Granite 3.0 Language Models", 2024): LLaMA's attention, routing
by a softmax over the top-k logits, and four multipliers: of embeddings, residuals, attention scores and 1 / logits."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import TopSoftmaxRouter
from zoo.models.decoder import Block, Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    make_attention_factory,
    make_mixture_factory,
    make_rms_norm_factory,
    read_head_sizes,
)
from zoo.models.hf.config import ConfigError
from zoo.models.hf.spec import Config, Family, NameMap, fused, prefixed

from ..describe import describe_mixture
from . import llama


def _build_granitemoe(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm, bias, scale = make_rms_norm_factory(config), config["attention_bias"], config["attention_multiplier"]
    if config["logits_scaling"] == 0:
        raise ConfigError("logits_scaling = 0: logits are divided by it")
    mixer = make_attention_factory(
        config, bias=bias, out_bias=bias, scale=None if scale == read_head_sizes(config)[2] ** -0.5 else scale
    )
    experts = make_mixture_factory(config, TopSoftmaxRouter, config["num_local_experts"])
    block = partial(Block, residual_multiplier=config["residual_multiplier"])
    multipliers = {"multiplier": config["embedding_multiplier"], "logits_multiplier": 1 / config["logits_scaling"]}
    layers = [(mixer, experts)] * config["num_hidden_layers"]
    return build_config_decoder(config, layers, norm, block=block, key=key, **multipliers)


def _map_granitemoe_names(config: Config) -> NameMap:
    fusion = fused("experts.gate", "experts.up")  # all experts in one tensor
    mixture = {"router.layer": "router.scores", "input_linear": fusion, "output_linear": "experts.down"}
    return llama.map_llama_layers(prefixed("block_sparse_moe", "mixture_of_experts", mixture))


def _map_granitemoe_memory_names(config: Config) -> NameMap:
    mixture = {"router": "router.scores", **prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES)}
    return llama.map_llama_layers(prefixed("block_sparse_moe", "mixture_of_experts", mixture))


GRANITEMOE = Family(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    build=_build_granitemoe,
    names=_map_granitemoe_names,
    defaults={
        **{key: value for key, value in llama.DEFAULTS.items() if key != "mlp_bias"},
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=_map_granitemoe_memory_names,
    describe=describe_mixture,
)
