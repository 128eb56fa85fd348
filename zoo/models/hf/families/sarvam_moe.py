"""Sarvam's mixture of experts (Sarvam AI, "Sarvam-30B", 2026): GLM-4.5's layer with a QK norm per head and RoPE on
whole heads, under names of its own."""

from zoo.models.hf import grammar as hf

from . import dots1, glm4_moe, llama


def _map_sarvam_moe_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of files. In memory, transformers has GLM-4.5's names."""
    attention = {
        "query_key_value": hf.fused("query", "key", "value"),
        "dense": "out",
        "query_layernorm": "query_norm",
        "key_layernorm": "key_norm",
    }
    mixture = {
        "gate": "router.scores",
        "gate.expert_bias": "router.selection_bias",
        **hf.prefixed("shared_experts", "shared", llama.GATED_MLP_NAMES),
        **hf.prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES),
    }
    block = {
        **llama.PRE_NORM_NAMES,
        **hf.prefixed("attention", "attention", attention),
        **hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES),
        **hf.prefixed("mlp", "mixture_of_experts", mixture),
    }
    shell = {"model.word_embeddings": "embedding", "model.norm": "norm", "lm_head": "head"}
    return {**shell, **hf.prefixed("model.layers.*", "layers.*", block)}


SARVAM_MOE = hf.Family(
    name="sarvam_moe",
    architecture="Glm4MoeForCausalLM",
    build=glm4_moe.build_glm4_moe,
    names=_map_sarvam_moe_names,
    defaults={
        **glm4_moe.GLM4_MOE.declared,
        "vocab_size": 262144,
        "intermediate_size": 8192,
        "num_hidden_layers": 19,
        "num_attention_heads": 64,
        "num_key_value_heads": hf.optional_count(4),
        "head_dim": hf.optional_count(64),
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 8000000.0, "partial_rotary_factor": 1.0},
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": hf.non_negative(1),
        "routed_scaling_factor": hf.Default(2.5, hf.POSITIVE_NUMBER),
        "use_qk_norm": True,
    },
    aliases={
        "num_local_experts": "n_routed_experts",
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    },
    ignored_keys=glm4_moe.GLM4_MOE.ignored_keys,
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=dots1.map_dots1_memory_names,
    embedding="model.word_embeddings",
)
