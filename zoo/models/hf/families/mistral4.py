"""Mistral Small 4 (Mistral AI, 2026): latent attention whose queries are scaled by position as in Ministral 3, and
mixtures of experts routed by softmax scores."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import SoftmaxRouter
from zoo.models.hf import grammar as hf

from . import deepseek_v2, llama, ministral3


def _build_mistral4(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    # qk_rope_head_dim tells the rotated part of a head; partial_rotary_factor is its share
    rope = {name: value for name, value in config["rope_parameters"].items() if name != "partial_rotary_factor"}
    config = hf.Config(config, rope_parameters=rope, head_dim=None, n_group=1, topk_group=1)
    router = partial(SoftmaxRouter, renormalize=config["norm_topk_prob"], scale=config["routed_scaling_factor"])
    options = {"interleaved": config["rope_interleave"], "query_scale": ministral3.read_query_scale(config)}
    mixers = [hf.make_latent_attention_factory(config, **options)] * config["num_hidden_layers"]
    return deepseek_v2.build_latent_decoder(config, router, mixers=mixers, key=key)


MISTRAL4 = hf.Family(
    name="mistral4",
    architecture="Mistral4ForCausalLM",
    build=_build_mistral4,
    names=deepseek_v2.map_deepseek_v2_memory_names,
    defaults={
        **hf.omit(deepseek_v2.DEFAULTS, "head_dim", "n_group", "topk_group"),
        "vocab_size": 131072,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": hf.optional_count(32),
        "max_position_embeddings": 1048576,
        "rope_parameters": {
            **ministral3.ROPE_PARAMETERS,
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "partial_rotary_factor": 0.5,
        },
        "rope_interleave": True,
        "kv_lora_rank": 256,
        "q_lora_rank": hf.optional_count(1024),
        "qk_nope_head_dim": 64,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    required_values={"n_group": (1,), "topk_group": (1,)},
    ignored_keys=deepseek_v2.IGNORED_KEYS | {"head_dim"},  # the sum of qk_nope_head_dim and qk_rope_head_dim
    ignored_tensors=llama.LLAMA.ignored_tensors,
    scaled_rope_theta=10000.0,
    rope_keys=ministral3.MINISTRAL3.rope_keys,
)
