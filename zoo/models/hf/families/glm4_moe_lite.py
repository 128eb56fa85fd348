"""GLM-4.7-Flash (Zeng et al., arXiv:2508.06471): DeepSeek-V3's latent attention and mixture of experts, after a dense
layer. Multi-token prediction layers (MTP), which files have after the last layer, are not read."""

import dataclasses

from zoo.models.hf import grammar as hf

from . import deepseek_v3

GLM4_MOE_LITE = dataclasses.replace(
    deepseek_v3.DEEPSEEK_V3,
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    defaults={
        **deepseek_v3.DEEPSEEK_V3.declared,
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": hf.optional_count(20),
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": hf.optional_count(768),
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": hf.non_negative(1),
        "mlp_layer_types": hf.optional_words(),
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": hf.Default(1.8, hf.POSITIVE_NUMBER),
        "n_group": 1,
        "topk_group": 1,
    },
)
