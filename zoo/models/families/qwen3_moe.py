"""Qwen3's mixture of experts (Yang et al., arXiv:2505.09388, section 2): Qwen3's attention, and experts none of which
all tokens share."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import SoftmaxRouter
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family
from zoo.models.pieces import head_norm, mixture, sparse_decoder

from . import llama, qwen2_moe
from .describe import described_mixture


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    router = partial(SoftmaxRouter, renormalise=config["norm_topk_prob"])
    experts = mixture(config, router, config["num_local_experts"], width=config["moe_intermediate_size"])
    sparse, bias = qwen2_moe.sparse(config), config["attention_bias"]
    window = config["sliding_window"] if config["use_sliding_window"] else None
    norms = {"qk_norm": head_norm(config), "bias": bias, "out_bias": bias}
    return sparse_decoder(config, sparse, experts, windows=[window] * len(sparse), key=key, **norms)


OTHERS = ("max_window_layers", "layer_types", "num_experts")

QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    build=build,
    names=qwen2_moe.names,
    defaults={
        **{key: value for key, value in qwen2_moe.DEFAULTS.items() if key not in OTHERS},
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
    },
    aliases={"num_experts": "num_local_experts"},  # two words for one thing: transformers 5 writes the second
    only={"layer_types": (None,)},
    inert=frozenset({"max_window_layers"}),
    ignored=llama.LLAMA.ignored,
    live_names=qwen2_moe.live_names,
    describe=described_mixture,
)
