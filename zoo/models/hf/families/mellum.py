"""Mellum 2 (JetBrains, "Mellum 2", 2026): Qwen3's mixture of experts, with a sliding window and a RoPE base of its own
in the layers that the config names. Multi-token prediction modules (MTP) are not read."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import SoftmaxRouter
from zoo.models.hf import grammar as hf

from . import dots1, llama, qwen2_moe


def _build_mellum(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    types = hf.read_layer_types(config, ["full_attention"] * config["num_hidden_layers"])
    windows = hf.list_layer_windows(types, config["sliding_window"])
    bias = config["attention_bias"]
    options = {"qk_norm": hf.make_head_norm_factory(config), "bias": bias, "out_bias": bias}
    mixers = hf.make_layerwise_attention_factories(config, windows, hf.build_layer_rotaries(config, types), **options)
    router = partial(SoftmaxRouter, renormalize=config["norm_topk_prob"])
    sparse = hf.make_mixture_factory(config, router, config["num_local_experts"], width=config["moe_intermediate_size"])
    dense = hf.make_gated_mlp_factory(config)
    marks = dots1.mark_dots1_moe_layers(hf.Config(config, first_k_dense_replace=0))
    ffns = [sparse if is_sparse else dense for is_sparse in marks]
    norm = hf.make_rms_norm_factory(config)
    return hf.build_config_decoder(config, list(zip(mixers, ffns, strict=True)), norm, key=key)


MELLUM = hf.Family(
    name="mellum",
    architecture="MellumForCausalLM",
    build=_build_mellum,
    names=qwen2_moe.map_qwen2_moe_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "mlp_bias"),
        "vocab_size": 98304,
        "hidden_size": 2304,
        "intermediate_size": 7168,
        "num_hidden_layers": 28,
        "num_key_value_heads": hf.optional_count(4),
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "full_attention": {"rope_theta": 500000.0},
            "sliding_attention": {"rope_theta": 10000.0},
        },
        "sliding_window": hf.optional_non_negative(1024),
        "layer_types": hf.optional_words(),
        "mlp_layer_types": hf.optional_words(),
        "moe_intermediate_size": 896,
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    aliases={"num_experts": "num_local_experts"},
    ignored_keys=frozenset(
        {"num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"},
    ),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    other_modules=(r"^mtp\.",),
    memory_names=qwen2_moe.map_qwen2_moe_memory_names,
)
