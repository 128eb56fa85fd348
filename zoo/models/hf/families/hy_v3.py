"""Hunyuan 3 (Tencent Hunyuan team, "Hy3", 2026): Qwen3's attention with DeepSeek-V3's mixture of experts after a dense
layer. Multi-token prediction layers (MTP), which files have after the last layer, are not read."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import deepseek_v3, dots1, llama, qwen2_moe


def _build_hy_v3(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    width = config["moe_intermediate_size"]
    bias = config["attention_bias"]
    config = hf.Config(config, n_group=1, topk_group=1, norm_topk_prob=True, first_k_dense_replace=1)
    router = hf.make_biased_router_factory(config)
    shared = config["num_shared_experts"] * width
    experts = hf.make_mixture_factory(config, router, config["num_experts"], width=width, shared=shared)
    options = {"qk_norm": hf.make_head_norm_factory(config), "bias": bias, "out_bias": bias}
    return hf.build_moe_decoder(config, dots1.mark_dots1_moe_layers(config), experts, key=key, **options)


def _map_hy_v3_names(config: hf.Config) -> hf.NameMap:
    mixture = {
        "router.gate": "router.scores",
        "expert_bias": "router.selection_bias",
        **hf.prefixed("shared_mlp", "shared", llama.GATED_MLP_NAMES),
        **hf.prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES),
    }
    return qwen2_moe.map_qwen2_moe_layers(mixture)


def _map_hy_v3_memory_names(config: hf.Config) -> hf.NameMap:
    mixture = {
        "gate": "router.scores",
        "e_score_correction_bias": "router.selection_bias",
        **hf.prefixed("shared_experts", "shared", llama.GATED_MLP_NAMES),
        **hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES),
    }
    return qwen2_moe.map_qwen2_moe_layers(mixture)


HY_V3 = hf.Family(
    name="hy_v3",
    architecture="HYV3ForCausalLM",
    build=_build_hy_v3,
    names=_map_hy_v3_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "mlp_bias"),
        "vocab_size": 120832,
        "intermediate_size": 13312,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": hf.optional_count(8),
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 11158840.0},
        "mlp_layer_types": hf.optional_words(),
        "moe_intermediate_size": 1536,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "routed_scaling_factor": hf.Default(2.826, hf.POSITIVE_NUMBER),
    },
    aliases={"router_scaling_factor": "routed_scaling_factor"},
    required_values={"mlp_bias": (False,)},
    ignored_keys=frozenset({"enable_moe_fp32_combine", "num_nextn_predict_layers", "num_mtp_layers"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    find_ignored_tensors=deepseek_v3.find_mtp_tensors,
    memory_names=_map_hy_v3_memory_names,
)
