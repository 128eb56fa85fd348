"""Qwen3's mixture of experts (Yang et al., arXiv:2505.09388, section 2): Qwen3's attention, and no shared expert."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import SoftmaxRouter
from zoo.models.hf import grammar as hf

from . import llama, qwen2_moe


def _build_qwen3_moe(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    router = partial(SoftmaxRouter, renormalize=config["norm_topk_prob"])
    experts = hf.make_mixture_factory(
        config, router, config["num_local_experts"], width=config["moe_intermediate_size"]
    )
    sparse = qwen2_moe.mark_qwen2_moe_layers(config)
    bias = config["attention_bias"]
    window = config["sliding_window"] if config["use_sliding_window"] else None
    norms = {"qk_norm": hf.make_head_norm_factory(config), "bias": bias, "out_bias": bias}
    return hf.build_moe_decoder(config, sparse, experts, windows=[window] * len(sparse), key=key, **norms)


QWEN3_MOE = hf.Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    build=_build_qwen3_moe,
    names=qwen2_moe.map_qwen2_moe_names,
    defaults={
        **hf.omit(qwen2_moe.DEFAULTS, "max_window_layers", "layer_types", "num_experts"),
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": hf.optional_count(4),
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
    },
    aliases={"num_experts": "num_local_experts"},  # synonyms: transformers 5 writes the second
    required_values={"layer_types": (None,)},
    ignored_keys=frozenset({"max_window_layers"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=qwen2_moe.map_qwen2_moe_memory_names,
    describe=hf.describe_mixture,
)
