"""OLMoE (Muennighoff et al., arXiv:2409.02060): fine-grained experts, QK norm over all heads, and clipping of queries,
keys and values if `clip_qkv` is set."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import RMSNorm, SoftmaxRouter
from zoo.models.hf import grammar as hf

from . import llama, qwen2_moe


def _build_olmoe(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    bias = config["attention_bias"]
    clip = config["clip_qkv"]
    experts = hf.make_mixture_factory(
        config, partial(SoftmaxRouter, renormalize=config["norm_topk_prob"]), config["num_experts"]
    )
    norm = partial(RMSNorm, epsilon=config["rms_norm_eps"])
    options = {"norm_over_heads": norm, "clip": clip, "bias": bias, "out_bias": bias}
    return hf.build_moe_decoder(config, [True] * config["num_hidden_layers"], experts, key=key, **options)


OLMOE = hf.Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    build=_build_olmoe,
    names=qwen2_moe.map_qwen2_moe_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "head_dim", "mlp_bias"),
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "clip_qkv": hf.optional_number(),
    },
    aliases={"num_local_experts": "num_experts"},
    required_values={"sliding_window": (None,)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=qwen2_moe.map_qwen2_moe_memory_names,
)
