"""Qwen1.5-MoE and Qwen2's mixture of experts (Yang et al., arXiv:2407.10671, section 2.2.2): fine-grained experts, a
wide shared expert with a sigmoid gate, and dense layers where the config has them."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Array, Key

from zoo.layers import MixtureOfExperts, SoftmaxRouter
from zoo.models.hf import grammar as hf

from . import llama, qwen2


def _build_qwen2_moe(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    window = config["sliding_window"] if config["use_sliding_window"] else None
    upper = config["max_window_layers"]
    numbers = range(config["num_hidden_layers"])
    default = hf.list_layer_types(window is not None and n < upper and n % 2 == 0 for n in numbers)
    experts = make_qwen2_moe_mixture(config, renormalize=config["norm_topk_prob"])
    windows = hf.list_layer_windows(hf.read_layer_types(config, default), window)
    return hf.build_moe_decoder(
        config, mark_qwen2_moe_layers(config), experts, windows=windows, bias=config["qkv_bias"], key=key
    )


def make_qwen2_moe_mixture(config: hf.Config, *, renormalize: bool) -> Callable[..., MixtureOfExperts]:
    """Return a factory of mixtures of experts with a shared one behind a sigmoid gate. `renormalize` divides the
    weights of the chosen experts by their sum."""
    return hf.make_mixture_factory(
        config,
        partial(SoftmaxRouter, renormalize=renormalize),
        config["num_experts"],
        width=config["moe_intermediate_size"],
        shared=config["shared_expert_intermediate_size"],
        gate=True,
    )


def mark_qwen2_moe_layers(config: hf.Config) -> list[bool]:
    """Return True per layer that is a mixture of experts: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    dense = config["mlp_only_layers"] or ()
    step = config["decoder_sparse_step"]
    return [n not in dense and (n + 1) % step == 0 for n in range(config["num_hidden_layers"])]


_SHARED_NAMES: hf.NameMap = {
    "gate": "router.scores",
    "shared_expert_gate": "shared_gate",
    **hf.prefixed("shared_expert", "shared", llama.GATED_MLP_NAMES),
}
MIXTURE_NAMES: hf.NameMap = {**_SHARED_NAMES, **hf.prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES)}
"""Names of a mixture in files, with one tensor per expert."""
FUSED_MIXTURE_NAMES: hf.NameMap = {**_SHARED_NAMES, **hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES)}
"""Names of a mixture in memory, with all experts of a layer in one tensor."""


def map_qwen2_moe_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of files, with one tensor per expert."""
    return map_qwen2_moe_layers(MIXTURE_NAMES)


def map_qwen2_moe_memory_names(config: hf.Config) -> hf.NameMap:
    """Return the name map in memory, with all experts of a layer in one tensor."""
    return map_qwen2_moe_layers(FUSED_MIXTURE_NAMES)


def map_qwen2_moe_layers(mixture: hf.NameMap) -> hf.NameMap:
    """Return a LLaMA-like name map in which dense layers and mixtures of experts are both called `mlp`."""
    return llama.map_llama_layers(name_qwen2_moe_feed_forward(mixture))


def name_qwen2_moe_feed_forward(mixture: hf.NameMap) -> hf.NameMap:
    """Return the names of the feed-forward layers, dense ones and mixtures of experts."""
    return {
        **hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES),
        **hf.prefixed("mlp", "mixture_of_experts", mixture),
    }


DEFAULTS = {
    **qwen2.DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": hf.optional_count(16),
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": hf.optional_layer_numbers(),
}

QWEN2_MOE = hf.Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    build=_build_qwen2_moe,
    names=map_qwen2_moe_names,
    defaults={**DEFAULTS, "shared_expert_intermediate_size": 5632, "qkv_bias": True},
    required_values=qwen2.QWEN2.required_values,
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=map_qwen2_moe_memory_names,
)
