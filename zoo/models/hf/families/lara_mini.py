"""Lara 4 Mini (Translated, 2026): the gated delta rule (arXiv:2412.06464), attention with a sliding window and RoPE,
and attention to all tokens without positions, each before a mixture of experts with a shared expert."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import SoftmaxRouter
from zoo.models.hf import grammar as hf

from . import llama, qwen3_5_text

_PATTERN = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")


def _build_lara_mini(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    bias = config["attention_bias"]
    attention = {"qk_norm": hf.make_head_norm_factory(config), "bias": bias, "out_bias": bias}
    mixers = {
        "linear_attention": qwen3_5_text.make_delta_factory(config),
        "sliding_attention": hf.make_attention_factory(config, window=config["sliding_window"], **attention),
        "full_attention": hf.make_attention_factory(config, rotary=None, **attention),
    }
    default = [_PATTERN[number % len(_PATTERN)] for number in range(config["num_hidden_layers"])]
    experts = hf.make_mixture_factory(
        config,
        partial(SoftmaxRouter, renormalize=config["norm_topk_prob"]),
        config["num_experts"],
        width=config["moe_intermediate_size"],
        shared=config["shared_expert_intermediate_size"],
    )
    layers = [(mixer, experts) for mixer in hf.pick_mixers(hf.read_layer_types(config, default), mixers)]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key)


def _map_lara_mini_layers(delta: hf.NameMap) -> hf.NameMap:
    mixers = {
        **hf.prefixed("linear_attn", "grouped_gated_delta_net", {**qwen3_5_text.DELTA_NAMES, **delta}),
        **hf.prefixed("self_attn", "attention", llama.ATTENTION_NAMES),
    }
    mixture = {
        "gate": "router.scores",
        **hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES),
        **hf.prefixed("shared_expert", "shared", llama.GATED_MLP_NAMES),
    }
    return llama.map_llama_layers(hf.prefixed("mlp", "mixture_of_experts", mixture), mixers)


def _map_lara_mini_names(config: hf.Config) -> hf.NameMap:
    inputs = hf.fused("query", "key", "value", "readout.gate", "rate", "decay.step")
    return _map_lara_mini_layers({"in_proj": inputs, "out_norm": "readout.norm"})


def _map_lara_mini_memory_names(config: hf.Config) -> hf.NameMap:
    return _map_lara_mini_layers({**qwen3_5_text.DELTA_INPUT_NAMES, "norm": "readout.norm"})


LARA_MINI = hf.Family(
    name="lara_mini",
    architecture="LaraMiniForCausalLM",
    build=_build_lara_mini,
    names=_map_lara_mini_names,
    defaults={
        **hf.omit(qwen3_5_text.DEFAULTS, "intermediate_size", "full_attention_interval"),
        "vocab_size": 151936,
        "hidden_size": 1024,
        "num_hidden_layers": 34,
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 10000.0},
        "attention_bias": False,
        "sliding_window": 512,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    ignored_keys=frozenset({"intermediate_size"}),  # width of an MLP that no layer has
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=_map_lara_mini_memory_names,
)
