"""Granite's mixture of experts (Granite team, "Granite 3.0 Language Models", 2024): LLaMA's attention, routing
by a softmax over the top-k logits, and four multipliers: of embeddings, residuals, attention scores and 1 / logits."""

from jaxtyping import Array, Key

from zoo.layers import TopSoftmaxRouter
from zoo.models.hf import grammar as hf

from . import granite, llama


def _build_granitemoe(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    experts = hf.make_mixture_factory(config, TopSoftmaxRouter, config["num_local_experts"])
    return granite.build_granite_layers(config, experts, key=key)


def map_granitemoe_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of files."""
    fusion = hf.fused("experts.gate", "experts.up")  # all experts in one tensor
    mixture = {"router.layer": "router.scores", "input_linear": fusion, "output_linear": "experts.down"}
    return llama.map_llama_layers(hf.prefixed("block_sparse_moe", "mixture_of_experts", mixture))


def map_granitemoe_memory_names(config: hf.Config) -> hf.NameMap:
    """Return the name map in memory."""
    mixture = {"router": "router.scores", **hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES)}
    return llama.map_llama_layers(hf.prefixed("block_sparse_moe", "mixture_of_experts", mixture))


DEFAULTS = {
    **hf.omit(granite.GRANITE.declared, "mlp_bias"),
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

GRANITEMOE = hf.Family(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    build=_build_granitemoe,
    names=map_granitemoe_names,
    defaults=DEFAULTS,
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=map_granitemoe_memory_names,
    describe=hf.describe_mixture,
)
