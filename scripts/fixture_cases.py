"""Reference cases of the tests: for each family a tiny config with the options that its files use."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Case:
    """A case: the model's family, a note, its config, how it is stored, and further keys of its config on a hub."""

    family: str
    note: str
    config: dict[str, Any]
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    shards: str = "1GB"
    hub: dict[str, Any] = field(default_factory=dict)
    as_published: bool = False
    """Store GPT-2's weights as first published: without a prefix, and with the causal mask."""
    packed: bool = False
    """Store the experts as MXFP4: their weights are representable, and packed after everything is computed."""
    unused: str = ""
    """Regular expression of the tensors that the class has and never uses, which have no gradient."""
    amiss: tuple[str, ...] = ()
    """Suffixes of the checks in which transformers is known to disagree with itself."""


def rope(kind: str = "default", theta: float = 1e4, **more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def layer_ropes(sliding: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    default = {"rope_type": "default"}
    return {"rope_parameters": {"sliding_attention": default | sliding, "full_attention": default | full}}


GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 17}
NEOX = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = NEOX | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
MOE = SIZES | {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
DEEPSEEK = MOE | {"n_routed_experts": 4, "first_k_dense_replace": 1, "norm_topk_prob": True}
LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 4}
LATENT = MOE | LATENT | {"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
V4_LAYERS = ("sliding", "heavily_compressed", "compressed_sparse")
INDEXER = {"q_lora_rank": 8, "index_topk": 5, "index_head_dim": 6, "index_n_heads": 8}  # few scores are 0, and tie
PUBLISHED = {"moe_layer_freq": 1, "ep_size": 1, "aux_loss_alpha": 0.001, "seq_aux": True}  # DeepSeek's files say so
YARN_4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 32}
MULTIPLIERS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3}
MULTIPLIERS |= {"residual_multiplier": 0.6, "logits_scaling": 1.7}
GPT_OSS = SIZES | {"head_dim": 6, "sliding_window": 5, "num_local_experts": 3, "num_experts_per_tok": 2}
IN_BLOCKS = {"hidden_size": 32, "intermediate_size": 32, "layer_types": ["full_attention"] * 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6}
DELTA |= {"head_dim": 8, "linear_conv_kernel_dim": 3}
OLMO_DELTA = {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 4}
OLMO_DELTA |= {"linear_value_head_dim": 4, "linear_conv_kernel_dim": 3}  # equal, since transformers saves equal thirds
MAMBA = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2}
HYBRID = SIZES | {"mamba_n_heads": 4, "mamba_d_state": 4, "mamba_chunk_size": 4}
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
NEMOTRON_H = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "head_dim": 6}
NEMOTRON_H |= {"num_key_value_heads": 2, "mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 4, "n_groups": 2}
NEMOTRON_H |= {"chunk_size": 4}
NEMOTRON_EXPERTS = {"layers_block_type": ["linear_attention", "moe", "full_attention"], "n_routed_experts": 4}
NEMOTRON_EXPERTS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "routed_scaling_factor": 1.5}
NEMOTRON_EXPERTS |= {"moe_shared_expert_intermediate_size": 14}
BOUNDS = ("cache_vs_nocache", "cache_same_tokens")  # one token from a cache does not heed the bounds of steps
LEAKS = ("padleft_vs_unpadded", *(f"padleft_{check}" for check in BOUNDS))  # biases write padding into the state
NO_MASK = (*BOUNDS, "padleft_vs_unpadded")  # RWKV heeds no mask, and a cache mixes its rows
HALF, WHOLE = {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0}
HALF_OF_FULL = layer_ropes({"rope_theta": 100.0} | WHOLE, {"rope_theta": 1e4} | HALF)
CASES = {
    "llama": Case(
        "llama", "grouped queries, the three bands of llama3 rope, tied",
        SIZES | rope("llama3", 500.0, **LLAMA3) | {"head_dim": 6} | TIED, dtype="float32", hub={"pretraining_tp": 1},
    ),
    "llama_sharded": Case(
        "llama", "shards, linear rope, biases everywhere but in the head, untied",
        SIZES | rope("linear", factor=2.0) | {"attention_bias": True, "mlp_bias": True}, shards="5KB",
    ),
    "mistral": Case("mistral", "a window of 5 in every layer, untied", SIZES | {"sliding_window": 5}),
    "qwen2": Case("qwen2", "a window of 5 in the second layer, tied", SIZES | rope(theta=1e6) | WINDOW | TIED),
    "qwen3": Case("qwen3", "norms of q and k, heads wider than hidden_size says, untied", SIZES | {"head_dim": 6}),
    "gemma": Case(
        "gemma", "norms of 1 + w, scaled embeddings, one kv head, tied",
        SIZES | {"head_dim": 6, "num_key_value_heads": 1}, hub={"hidden_act": "gelu", "hidden_activation": None},
    ),
    "gpt2": Case("gpt2", "learned positions, weights stored (in, out), tied", GPT2 | {"n_inner": 20}),
    "gpt2_hub": Case(
        "gpt2", "one layer; names without a prefix, a mask among the weights, tied", GPT2 | {"n_layer": 1},
        hub={"n_ctx": 17, "task_specific_params": {"text-generation": {"max_length": 50}}}, as_published=True,
    ),
    "gpt2_inverse": Case(
        "gpt2", "scores divided by the number of the layer, untied",
        GPT2 | {"scale_attn_by_inverse_layer_idx": True} | UNTIED,
    ),
    "gpt_neox": Case(
        "gpt_neox", "q, k and v fused by head, half of each head rotated, attention and MLP in parallel, untied",
        NEOX | rope(theta=100.0, partial_rotary_factor=0.5),
    ),
    "mixtral": Case(
        "mixtral", "two of four experts, renormalized, a window of 5, untied",
        SIZES | {"num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": 5},
    ),
    "phimoe": Case(
        "phimoe", "LayerNorm, two of four experts by SparseMixer, biases in attention and head, a window of 5, untied",
        SIZES | {"num_local_experts": 4, "router_jitter_noise": 0.2, "attention_bias": True, "lm_head_bias": True}
        | {"sliding_window": 5} | UNTIED, dtype="float32", hub={"input_jitter_noise": 0.01},
    ),
    "qwen2_moe": Case(
        "qwen2_moe", "a gated shared expert, not renormalized, a window of 5 in the first layer, untied",
        MOE | {"num_experts": 4, "shared_expert_intermediate_size": 16}
        | {"use_sliding_window": True, "sliding_window": 5},
    ),
    "qwen3_moe": Case(
        "qwen3_moe", "a dense layer and a mixture, renormalized, heads wider than hidden_size says, tied",
        MOE | {"num_experts": 4, "norm_topk_prob": True, "decoder_sparse_step": 2, "head_dim": 6} | TIED,
        hub={"num_experts": 4},
    ),
    "olmoe": Case(
        "olmoe", "norms over all heads together, values of q, k and v clipped, untied",
        SIZES | {"num_experts_per_tok": 2, "num_experts": 4, "clip_qkv": 0.8},
    ),
    "granitemoe": Case(
        "granitemoe", "experts of a layer in one tensor, gate and up fused, four multipliers, tied",
        SIZES | {"num_experts_per_tok": 2, "num_local_experts": 4} | MULTIPLIERS | TIED,
    ),
    "dots1": Case(
        "dots1", "a bias that chooses, the better of two groups, shared experts, a dense layer, a window of 5, untied",
        DEEPSEEK | {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.5}
        | {"sliding_window": 5, "max_window_layers": 1},
    ),
    "glm4_moe": Case(
        "glm4_moe",
        "a bias that chooses, half of each head rotated, norms and biases of q and k, a dense layer, untied",
        DEEPSEEK | {"use_qk_norm": True, "attention_bias": True, "head_dim": 8, "n_shared_experts": 1}
        | rope(partial_rotary_factor=0.5),
    ),
    "ernie4_5_moe": Case(
        "ernie4_5_moe", "softmax scores and a bias that chooses, interleaved rope, shared experts, a dense layer, tied",
        SIZES | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12} | TIED,
    ),
    "deepseek_v2": Case(
        "deepseek_v2", "latent attention, yarn with mscale_all_dim, the better of two groups, a dense layer, tied",
        LATENT | rope("yarn", **YARN) | {"q_lora_rank": None, "topk_method": "group_limited_greedy"}
        | {"n_shared_experts": 2, "routed_scaling_factor": 1.7} | TIED,
        hub={"scoring_func": "softmax", **PUBLISHED},
    ),
    "deepseek_v3": Case(
        "deepseek_v3", "latent attention with latents of queries and biases, half-split rope, a dense layer, untied",
        LATENT | {"q_lora_rank": 8, "attention_bias": True, "rope_interleave": False, "norm_topk_prob": False},
        dtype="float32", hub={"scoring_func": "sigmoid", "topk_method": "noaux_tc", **PUBLISHED},
    ),
    "deepseek_v32": Case(
        "deepseek_v32", "an indexer that selects 5 keys, half-split rope in it, yarn, a dense layer, untied",
        LATENT | INDEXER | rope("yarn", 5e4, **YARN), dtype="float32",
        hub={"scoring_func": "sigmoid", "topk_method": "noaux_tc", **PUBLISHED},
    ),
    "glm_moe_dsa": Case(
        "glm_moe_dsa", "a third layer with the selection of the second, interleaved rope in the indexer, untied",
        LATENT | INDEXER | {"num_hidden_layers": 3, "index_topk_freq": 2, "attention_bias": True}, dtype="float32",
        hub={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "indexer_rope_interleave": True, **PUBLISHED},
    ),
    "gpt_oss": Case(
        "gpt_oss", "sinks, a window of 5 in the first layer, a clamp that is reached, gate and up interleaved, untied",
        GPT_OSS | {"swiglu_limit": 0.6},
        hub={"initial_context_length": 4096, "experts_per_token": 2},
    ),
    "gpt_oss_mxfp4": Case(
        "gpt_oss", "experts stored as MXFP4, no window, yarn that is not rounded to whole pairs, tied",
        GPT_OSS | IN_BLOCKS | {"swiglu_alpha": 1.4} | TIED
        | rope("yarn", 5e4, factor=4.0, truncate=False, original_max_position_embeddings=32), packed=True,
    ),
    "mamba": Case(
        "mamba", "a state of 3 a channel, steps of rank 2, biases everywhere, tied",
        MAMBA | {"state_size": 3, "time_step_rank": 2, "use_bias": True},
        hub={"d_model": 16, "d_inner": 32, "n_layer": 2, "ssm_cfg": {}, "rms_norm": True, "fused_add_norm": True}
        | {"pad_vocab_size_multiple": 8}, amiss=LEAKS,
    ),
    "falcon_mamba": Case(
        "falcon_mamba", "norms without weights on steps, B and C, untied",
        MAMBA | {"state_size": 3, "mixer_rms_eps": 0.01, "tie_word_embeddings": False},
    ),
    "falcon_h1": Case(
        "falcon_h1", "attention beside Mamba-2 without a norm, multipliers, a bias of its output, untied",
        HYBRID | {"head_dim": 6, "mamba_d_ssm": 24, "projectors_bias": True, "key_multiplier": 0.6} | UNTIED
        | {"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.3}
        | {"ssm_out_multiplier": 0.7, "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2], "mlp_multipliers": [0.8, 0.7]}
        | {"embedding_multiplier": 2.5, "lm_head_multiplier": 0.6},
        hub={"mamba_use_mlp": True, "mlp_expansion_factor": 8},
    ),
    "falcon_h1_norm": Case(
        "falcon_h1", "a norm of two groups after the gate, no multipliers, tied",
        HYBRID | {"mamba_d_ssm": 32, "mamba_n_groups": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
        | TIED, dtype="float32",
    ),
    "mamba2": Case(
        "mamba2", "two groups of two heads, chunks of 4, bounds of steps that are reached, untied",
        MAMBA | {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4}
        | {"time_step_limit": [0.01, 0.05]}, amiss=BOUNDS,
    ),
    "mamba2_tied": Case(
        "mamba2", "one group, no bounds of steps, a convolution of 3 without a bias, tied",
        MAMBA | {"state_size": 4, "num_heads": 2, "head_dim": 16, "n_groups": 1, "conv_kernel": 3}
        | {"use_conv_bias": False} | TIED, dtype="float32", hub={"norm_before_gate": True, "rms_norm": True},
    ),
    "bamba": Case(
        "bamba", "Mamba-2 of two groups, then attention with half of each head rotated, bounds of steps, untied",
        HYBRID | {"attn_layer_indices": [1], "mamba_n_groups": 2, "time_step_limit": [0.01, 0.8]} | UNTIED,
        hub={"attn_rotary_emb": 2, "use_mamba_kernels": True}, amiss=BOUNDS,
    ),
    "jamba": Case(
        "jamba", "Mamba and two of four experts, then attention without positions and a dense MLP, tied",
        SIZES | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0}
        | {"mamba_d_state": 3, "mamba_dt_rank": 2, "num_experts": 4, "num_experts_per_tok": 2} | TIED,
        hub={"use_mamba_kernels": False, "calc_logits_for_entire_prompt": False, "mamba_inner_layernorms": True}
        | {"sliding_window": None},
    ),
    "rwkv": Case(
        "rwkv", "RWKV-4, a feed-forward part not much wider than the stream, untied",
        MAMBA | {"intermediate_size": 20}, hub={"context_length": 64}, amiss=NO_MASK,
    ),
    "rwkv_rescaled": Case(
        "rwkv", "a residual stream that is halved after the second layer, untied",
        MAMBA | {"intermediate_size": 20, "rescale_every": 2}, hub={"context_length": 64}, amiss=NO_MASK,
    ),
    "apertus": Case(
        "apertus", "an MLP with xIELU, norms of q and k, plain rope, biases of attention, tied",
        SIZES | rope() | {"attention_bias": True} | TIED, hub={"rope_scaling": {"rope_type": "default"}},
    ),
    "arcee": Case(
        "arcee", "an MLP without a gate, ReLU squared, biases, linear rope, tied",
        SIZES | rope("linear", factor=2.0) | {"attention_bias": True, "mlp_bias": True} | TIED,
    ),
    "bloom": Case(
        "bloom", "ALiBi of six heads, q, k and v fused by head, a norm after the embedding, tied",
        {"vocab_size": 40, "hidden_size": 24, "n_layer": 2, "n_head": 6},
    ),
    "cohere": Case(
        "cohere", "attention and MLP in parallel, norms without bias, interleaved rope, scaled logits, biases, tied",
        SIZES | {"logit_scale": 0.4, "attention_bias": True} | TIED,
    ),
    "cohere_qk_norm": Case("cohere", "a QK norm for each head, tied", SIZES | {"use_qk_norm": True} | TIED),
    "cohere2": Case(
        "cohere2", "a window of 5 with rope in the first layer, none in the second, heads of 6, tied",
        SIZES | MIXED | {"logit_scale": 0.4, "head_dim": 6} | TIED,
    ),
    "ernie4_5": Case("ernie4_5", "interleaved rope, biases, untied", SIZES | {"use_bias": True, **UNTIED}),
    "exaone4": Case(
        "exaone4", "norms after the sublayers, norms of q and k, a window of 5 with rope, full attention without, tied",
        SIZES | MIXED | TIED,
    ),
    "exaone_moe": Case(
        "exaone_moe", "a dense layer with a window of 5, a mixture without, the better of two groups, untied",
        MOE | MIXED | {"num_experts": 4, "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]}
        | {"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    ),
    "falcon": Case(
        "falcon", "two norms in parallel, two keys for four heads, biases, tied",
        MAMBA | {"num_attention_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 20, "bias": True}
        | {"new_decoder_architecture": True, "max_position_embeddings": 128},
    ),
    "falcon_serial": Case(
        "falcon", "rope, a key for each head, attention and MLP one after the other, untied",
        MAMBA | {"num_attention_heads": 2, "multi_query": False, "parallel_attn": False, "ffn_hidden_size": 20}
        | UNTIED,
    ),
    "gemma2": Case(
        "gemma2", "norms before and after, soft caps that are reached, a window of 5 in the first layer, tied",
        SIZES | MIXED | {"head_dim": 6, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 1.5}
        | {"final_logit_softcapping": 3.0},
    ),
    "gemma3_text": Case(
        "gemma3_text", "a window of 5 in the first layer, with a rope base of its own, norms of q and k, tied",
        SIZES | MIXED | {"head_dim": 6, "query_pre_attn_scalar": 9, "final_logit_softcapping": 3.0}
        | layer_ropes({"rope_theta": 100.0}, {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}),
        hub={"rope_theta": 1e4, "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "gemma3n_text": Case(
        "gemma3n_text", "three streams, of which layers compute the second, a sparse layer, reused keys, biases, tied",
        SIZES | {"num_hidden_layers": 4, "layer_types": [*MIXED["layer_types"], *["sliding_attention"] * 2]}
        | layer_ropes({"rope_theta": 100.0}, {"rope_theta": 1e4}) | {"sliding_window": 5, "head_dim": 4}
        | {"num_kv_shared_layers": 2, "attention_bias": True, "intermediate_size": [20, 20, 24, 24], "laurel_rank": 3}
        | {"activation_sparsity_pattern": [0.7, 0.0, 0.0, 0.0], "altup_num_inputs": 3, "altup_active_idx": 1}
        | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 40, "final_logit_softcapping": 3.0},
        hub={"rope_theta": 1e4, "rope_local_base_freq": 100.0, "altup_lr_multiplier": 1.0},
    ),
    "gemma4_text": Case(
        "gemma4_text", "inputs of each layer, keys of earlier layers reused beside wide MLPs, keys as values, tied",
        SIZES | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"sliding_window": 5, "head_dim": 4, "global_head_dim": 8, "num_kv_shared_layers": 2}
        | {"use_double_wide_mlp": True, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 40, "final_logit_softcapping": 3.0},
    ),
    "gemma4_text_moe": Case(
        "gemma4_text", "a mixture of experts beside the MLP, no inputs of layers, keys as values, tied",
        SIZES | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 4}
        | {"global_head_dim": 8, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0, "enable_moe_block": True}
        | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12},
    ),
    "glm": Case(
        "glm", "half of each head rotated, interleaved, gate and up fused, no biases, tied",
        SIZES | rope(partial_rotary_factor=0.5) | {"head_dim": 8, "attention_bias": False} | TIED,
    ),
    "glm4": Case(
        "glm4", "norms before and after, half of each head rotated, interleaved, biases of q, k and v, untied",
        SIZES | rope(partial_rotary_factor=0.5) | {"head_dim": 8, "attention_bias": True},
    ),
    "glm4_moe_lite": Case(
        "glm4_moe_lite", "latent attention without latents of queries, half-split rope, two groups, biases, untied",
        LATENT | {"q_lora_rank": None, "rope_interleave": False, "mlp_layer_types": ["dense", "sparse"]}
        | {"n_shared_experts": 1, "norm_topk_prob": False, "attention_bias": True},
    ),
    "gptj": Case(
        "gptj", "attention and MLP in parallel after one norm, 4 of 8 channels rotated, interleaved, a head with bias",
        GPT2 | {"n_inner": 20, "rotary_dim": 4, "activation_function": "relu"},
    ),
    "granite": Case(
        "granite", "four multipliers, biases, tied",
        SIZES | MULTIPLIERS | {"attention_bias": True, "mlp_bias": True} | TIED,
    ),
    "granitemoeshared": Case(
        "granitemoeshared", "a shared MLP beside the experts, four multipliers, tied",
        SIZES | MULTIPLIERS | {"num_experts_per_tok": 2, "num_local_experts": 4, "shared_intermediate_size": 12} | TIED,
    ),
    "granitemoehybrid": Case(
        "granitemoehybrid", "Mamba-2, then attention without positions, experts beside a shared MLP, multipliers, tied",
        HYBRID | MULTIPLIERS | {"num_experts_per_tok": 2, "num_local_experts": 4, "shared_intermediate_size": 12}
        | LAYERS | TIED, hub={"layer_types": ["mamba", "attention"], "position_embedding_type": "nope"}
        | {"normalization_function": "rmsnorm", "init_method": "mup"},
    ),
    "granitemoehybrid_dense": Case(
        "granitemoehybrid", "Mamba-2 of two groups, then attention with rope, an MLP and no experts, biases, untied",
        HYBRID | MULTIPLIERS | {"num_experts_per_tok": 0, "num_local_experts": 0, "shared_intermediate_size": 20}
        | LAYERS | {"position_embedding_type": "rope", "attention_bias": True, "mamba_n_groups": 2} | UNTIED,
        dtype="float32",
    ),
    "hunyuan_v1_dense": Case(
        "hunyuan_v1_dense", "norms of q and k after the rotation, a base stretched by alpha, biases, untied",
        SIZES | rope("dynamic", alpha=50.0, factor=1.0) | {"head_dim": 6, "attention_bias": True},
    ),
    "hunyuan_v1_moe": Case(
        "hunyuan_v1_moe", "norms of q and k after the rotation, a shared expert, two of four experts, tied",
        SIZES | {"num_experts": 4, "moe_topk": 2, "head_dim": 6} | TIED,
    ),
    "hy_v3": Case(
        "hy_v3", "norms of q and k, a dense layer, a bias that chooses, a shared expert, scaled experts, tied",
        MOE | {"num_experts": 4, "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"], "head_dim": 6}
        | {"router_scaling_factor": 1.5} | TIED,
    ),
    "ministral3": Case(
        "ministral3", "queries scaled by position in steps of 4, yarn, a window of 5, heads of 6, tied",
        SIZES | rope("yarn", factor=4.0, llama_4_scaling_beta=0.5, original_max_position_embeddings=4)
        | {"head_dim": 6, "sliding_window": 5} | TIED,
    ),
    "minimax_m2": Case(
        "minimax_m2", "a norm over all heads of q and of k, half of each head rotated, a bias that chooses, tied",
        SIZES | rope(partial_rotary_factor=0.5) | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
        | TIED,
    ),
    "ministral": Case(
        "ministral", "a window of 5 in the first layer, heads of 6, tied", SIZES | MIXED | {"head_dim": 6} | TIED,
    ),
    "mpt": Case(
        "mpt", "ALiBi of six heads, q, k and v clipped, scaled scores, untied",
        {"vocab_size": 40, "d_model": 24, "n_layers": 2, "n_heads": 6, "max_seq_len": 64}
        | {"attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.5}} | UNTIED,
    ),
    "mistral4": Case(
        "mistral4", "latent attention, queries scaled by position in steps of 4, yarn, a dense layer, tied",
        {key: value for key, value in LATENT.items() if key not in ("n_group", "topk_group")} | {"q_lora_rank": 8}
        | rope("yarn", factor=4.0, llama_4_scaling_beta=0.5, original_max_position_embeddings=4)
        | {"norm_topk_prob": False, "routed_scaling_factor": 1.5} | TIED,
    ),
    "nanochat": Case(
        "nanochat", "norms without weights, on q and k after the rotation too, ReLU squared, capped logits, untied",
        SIZES | {"final_logit_softcapping": 3.0, "attention_bias": True},
    ),
    "nemotron": Case(
        "nemotron", "LayerNorms of 1 + w, an MLP without a gate, half of each head rotated, biases, untied",
        SIZES | rope(partial_rotary_factor=0.5) | {"head_dim": 8, "attention_bias": True, "mlp_bias": True},
    ),
    "nemotron_h": Case(
        "nemotron_h", "Mamba-2 of two groups, an MLP of squared ReLUs, attention, each alone in a layer, untied",
        NEMOTRON_H | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]}
        | {"time_step_min": 0.3},
        hub={"hybrid_override_pattern": "M-*M", "num_hidden_layers": 4, "rms_norm_eps": 1e-5}, amiss=BOUNDS,
    ),
    "nemotron_h_moe": Case(
        "nemotron_h", "Mamba-2, two of four experts beside a wider shared MLP, a bias that chooses, attention, untied",
        NEMOTRON_H | NEMOTRON_EXPERTS, hub={"hybrid_override_pattern": "ME*", "num_hidden_layers": 3}, amiss=BOUNDS,
    ),
    "nemotron_h_latent": Case(
        "nemotron_h", "experts of a latent of 8 beside a shared MLP, two groups of experts, biases of MLPs, untied",
        NEMOTRON_H | NEMOTRON_EXPERTS | {"moe_latent_size": 8, "n_group": 2, "topk_group": 1, "mlp_bias": True},
        hub={"hybrid_override_pattern": "ME*", "num_hidden_layers": 3}, amiss=BOUNDS,
    ),
    "olmo": Case("olmo", "norms without weights, nothing clipped, tied", SIZES | {"clip_qkv": None} | TIED),
    "olmo2": Case("olmo2", "norms after the sublayers, norms over all heads, tied", SIZES | TIED),
    "olmo3": Case(
        "olmo3", "a window of 5 in the first layer, yarn in the second, norms after the sublayers, untied",
        SIZES | MIXED | layer_ropes({"rope_theta": 5e5}, YARN_4 | {"rope_theta": 5e5}), hub={"rope_scaling": YARN_4},
    ),
    "opt": Case(
        "opt", "learned positions after two rows that nothing reads, ReLU, no biases of matrices, tied",
        MAMBA | {"ffn_dim": 20, "num_attention_heads": 2, "max_position_embeddings": 17, "enable_bias": False},
    ),
    "opt_post_norm": Case(
        "opt", "norms after the sums, none after the last layer, embeddings of 12 features, projected, tied",
        MAMBA | {"ffn_dim": 20, "num_attention_heads": 2, "max_position_embeddings": 17}
        | {"do_layer_norm_before": False, "word_embed_proj_dim": 12},
    ),
    "opt_projected": Case(
        "opt", "norms before the sublayers, a projected embedding, a head of its own, no scales of norms",
        MAMBA | {"ffn_dim": 20, "num_attention_heads": 2, "max_position_embeddings": 17, "word_embed_proj_dim": 12}
        | {"layer_norm_elementwise_affine": False} | UNTIED,
    ),
    "phi": Case(
        "phi", "attention and MLP in parallel after one norm, half of each head rotated, biases, untied",
        SIZES | rope(partial_rotary_factor=0.5),
    ),
    "phi3": Case("phi3", "q, k and v fused, gate and up fused, no window, untied", SIZES),
    "phi3_window": Case(
        "phi3", "half of each head rotated, a window of 5, tied",
        SIZES | rope(partial_rotary_factor=0.5) | {"sliding_window": 5} | TIED,
    ),
    "qwen3_5_text": Case(
        "qwen3_5_text", "gated delta rule with two heads for each key, then gated attention, a quarter rotated, tied",
        SIZES | rope(partial_rotary_factor=0.25) | TIED | DELTA
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "qwen3_5_moe_text": Case(
        "qwen3_5_moe_text", "gated attention, then the gated delta rule; experts with a gated shared expert, tied",
        {key: value for key, value in MOE.items() if key != "intermediate_size"}
        | rope(partial_rotary_factor=0.25) | DELTA | TIED
        | {"layer_types": ["full_attention", "linear_attention"], "num_experts": 4}
        | {"shared_expert_intermediate_size": 8},
    ),
    "qwen3_next": Case(
        "qwen3_next", "gated delta rule, its projections fused per key, then gated attention; experts, then an MLP",
        MOE | rope(partial_rotary_factor=0.5) | DELTA | {
            "layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "mlp_only_layers": [1],
            "norm_topk_prob": False, "shared_expert_intermediate_size": 8,
        },
    ),
    "minimax": Case(
        "minimax", "Lightning attention, then softmax attention; residuals after norms, with factors; experts, untied",
        SIZES | {
            "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 3, "num_experts_per_tok": 2,
            "linear_attn_alpha_factor": 1.2, "linear_attn_beta_factor": 0.9, "full_attn_alpha_factor": 1.3,
            "full_attn_beta_factor": 0.8, "mlp_alpha_factor": 1.1, "mlp_beta_factor": 0.7, "block_size": 4,
        },
        dtype="float32", amiss=("cache_vs_nocache", "cache_same_tokens"),
    ),
    "bailing_hybrid": Case(
        "bailing_hybrid", "KDA with bounded decays, then latent attention with a gate per head; a dense layer, experts",
        SIZES | {
            "num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"], "kv_lora_rank": 10,
            "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "num_local_experts": 4, "n_group": 2,
            "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 5,
            "short_conv_kernel_size": 3, "first_k_dense_replace": 1, "rope_theta": 1e4, "kda_lower_bound": -3.0,
        },
    ),
    "kimi_linear": Case(
        "kimi_linear", "Kimi Delta Attention, then latent attention without positions; a dense layer, then experts",
        {key: value for key, value in SIZES.items() if key != "max_position_embeddings"} | {
            "num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"], "kv_lora_rank": 10,
            "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "num_local_experts": 4, "n_group": 2,
            "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "linear_head_dim": 6,
            "linear_num_heads": 2, "linear_conv_kernel_dim": 3,
        },
    ),
    "xlstm": Case(
        "xlstm", "mLSTM with four heads wider than the model, gates and logits capped, untied",
        MAMBA | {
            "num_heads": 4, "qk_dim_factor": 4.0, "v_dim_factor": 4.0, "ffn_round_up_to_multiple_of": 12,
            "gate_soft_cap": 5.0, "output_logit_soft_cap": 3.0, "autocast_kernel_dtype": "float32",
        },
        amiss=NO_MASK,
    ),
    "olmo_hybrid": Case(
        "olmo_hybrid", "gated delta rule with betas up to 2 after its norm, then attention with RoPE before its norm",
        SIZES | rope(theta=500.0) | OLMO_DELTA,
    ),
    "olmo_hybrid_nope": Case(
        "olmo_hybrid", "attention without RoPE, then the gated delta rule with betas up to 1, tied",
        SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": None}} | OLMO_DELTA | TIED
        | {"layer_types": ["full_attention", "linear_attention"], "linear_allow_neg_eigval": False},
    ),
    "lfm3": Case(
        "lfm3", "attention with a gate per head, then a convolution, then a window of 5; norms around sublayers, tied",
        SIZES | {
            "num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "sliding_attention"], "sliding_window": 5,
            "head_dim": 8, "conv_L_cache": 3,
        },
    ),
    "lfm2": Case(
        "lfm2", "a convolution over three tokens with two gates, then attention with norms of q and k, tied",
        SIZES | {"block_multiple_of": 4, "layer_types": ["conv", "full_attention"]},
    ),
    "lfm2_moe": Case(
        "lfm2_moe", "the same with four experts after the dense layer, sigmoid scores with a bias, tied",
        MOE | {"num_experts": 4, "num_dense_layers": 1, "layer_types": ["full_attention", "conv"]}
        | {"routed_scaling_factor": 1.5, "conv_L_cache": 4},
    ),
    "seed_oss": Case(
        "seed_oss", "biases of the output and the MLP too, heads of 6, tied",
        SIZES | {"head_dim": 6, "attention_out_bias": True, "mlp_bias": True} | TIED,
    ),
    "smollm3": Case(
        "smollm3", "rope in the first layer alone, a window of 5 there, biases, tied",
        SIZES | MIXED | {"no_rope_layers": [1, 0], "use_sliding_window": True, "attention_bias": True} | TIED,
    ),
    "afmoe": Case(
        "afmoe", "an output gate, a window of 5 and rope in the first layer, norms around sublayers, experts, tied",
        MOE | MIXED | {"num_experts": 4, "num_shared_experts": 1, "num_dense_layers": 1, "head_dim": 6}
        | {"route_scale": 1.5, "mup_enabled": True} | TIED,
    ),
    "jetmoe": Case(
        "jetmoe", "two of four experts of queries and outputs beside shared keys, two of four in the MLP, biases, tied",
        {key: value for key, value in SIZES.items() if key != "num_attention_heads"}
        | {"kv_channels": 6, "num_local_experts": 4} | TIED,
    ),
    "llama4_text": Case(
        "llama4_text", "chunks of 5 and rope in the first layer, queries scaled by position and experts after it, tied",
        SIZES | {"head_dim": 6, "intermediate_size_mlp": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 0], "attention_chunk_size": 5, "attn_scale": 0.3}
        | {"floor_scale": 4, "layer_types": ["chunked_attention", "full_attention"]} | TIED,
        amiss=("padleft_vs_unpadded", "padleft_cache_vs_nocache"),  # padding counts in chunks
    ),
    "mimo_v2_flash": Case(
        "mimo_v2_flash", "a dense layer, then a window of 5 with sinks and more KV heads, a third of each head rotated",
        MOE | MIXED | {"n_routed_experts": 4, "head_dim": 12, "v_head_dim": 6, "mlp_layer_types": ["dense", "sparse"]}
        | {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "stablelm": Case(
        "stablelm", "a QK norm for each head, a quarter of each head rotated, biases, tied",
        SIZES | rope(partial_rotary_factor=0.25) | {"hidden_size": 32, "qk_layernorm": True, "use_qkv_bias": True}
        | TIED,
    ),
    "stablelm_parallel": Case(
        "stablelm", "attention and MLP in parallel after one norm, half of each head rotated, untied",
        SIZES | rope(partial_rotary_factor=0.5) | {"use_parallel_residual": True},
    ),
    "starcoder2": Case(
        "starcoder2", "LayerNorms, an MLP without a gate, no biases, no window, untied",
        SIZES | {"use_bias": False, "sliding_window": None} | UNTIED,
    ),
    "exaone": Case(
        "exaone", "names of its own, grouped queries, the three bands of llama3 rope, tied",
        SIZES | rope("llama3", 500.0, **LLAMA3) | TIED,
        hub={"num_layers": 2, "layer_norm_epsilon": 2e-3, "activation_function": "silu", "embed_dropout": 0.0},
    ),
    "internlm3": Case(
        "internlm3", "biases, linear rope, heads of 4, untied",
        SIZES | rope("linear", factor=2.0) | {"attention_bias": True, "mlp_bias": True, "head_dim": 4},
        hub={"qkv_bias": True, "bias": True},
    ),
    "iquestcoder": Case(
        "iquestcoder", "heads of 6, untied", SIZES | rope(theta=5e5) | {"head_dim": 6},
        hub={"clip_qkv": None, "use_sliding_window": False},
    ),
    "cwm": Case(
        "cwm", "full attention in the first layer, a window of 5 in the second, the three bands of llama3 rope, untied",
        SIZES | rope("llama3", 500.0, **LLAMA3) | {"head_dim": 6, "sliding_window": 5},
    ),
    "helium": Case(
        "helium", "interleaved rope, biases of q, k and v, untied", SIZES | {"head_dim": 4, "attention_bias": True},
    ),
    "vaultgemma": Case(
        "vaultgemma", "norms before the sublayers, soft caps that are reached, a window of 5 in the first layer, tied",
        SIZES | MIXED | {"head_dim": 6, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 1.5}
        | {"final_logit_softcapping": 3.0},
    ),
    "jais2": Case("jais2", "LayerNorms, biases, an MLP without a gate, ReLU squared, tied", SIZES | TIED),
    "hyperclovax": Case(
        "hyperclovax", "norms before and after, four multipliers, of logits too, untied",
        SIZES | MULTIPLIERS | {"head_dim": 6},
    ),
    "hyperclovax_pre_norm": Case(
        "hyperclovax", "norms before, usual scores, biases, tied",
        SIZES | {"use_post_norm": False, "residual_multiplier": 0.6, "attention_bias": True, "mlp_bias": True} | TIED,
    ),
    "granite_swa": Case(
        "granite_swa", "sinks, a window of 5 with a rope base of its own, full attention without rope, tied",
        SIZES | MULTIPLIERS | MIXED | {"layer_rope_theta": [100.0, 0]},
    ),
    "granitemoe_swa": Case(
        "granitemoe_swa", "sinks, full attention, then a window of 5, a shared MLP beside the experts, untied",
        SIZES | MULTIPLIERS | {"num_experts_per_tok": 2, "num_local_experts": 4, "shared_intermediate_size": 12}
        | {"sliding_window": 5},
    ),
    "mellum": Case(
        "mellum", "a window of 5 with a rope base of its own and a dense layer, then yarn and experts, untied",
        MOE | MIXED | {"num_experts": 4, "head_dim": 6, "mlp_layer_types": ["dense", "sparse"]}
        | layer_ropes({"rope_theta": 100.0}, YARN_4 | {"rope_theta": 1e4}),
        hub=layer_ropes({"rope_theta": 100.0}, YARN_4 | {"rope_theta": 1e4}),  # the only spelling that it has
    ),
    "sarvam_moe": Case(
        "sarvam_moe", "names of its own, norms of q and k, the better of two groups, a dense layer, biases, tied",
        DEEPSEEK | {"n_group": 2, "topk_group": 1, "attention_bias": True, "head_dim": 6, "n_shared_experts": 1} | TIED,
        hub={"num_experts": 4, "num_shared_experts": 1, "use_qkv_bias": True},
    ),
    "sarvam_mla": Case(
        "sarvam_mla", "latent attention without latents of queries, deepseek_yarn, a dense layer, untied",
        LATENT | rope("yarn", 5e4, **YARN),
        hub={"scoring_func": "sigmoid", "head_dim": 14, "q_head_dim": 10, "num_experts": 4, "num_shared_experts": 1}
        | {"rope_scaling": {"type": "deepseek_yarn", **YARN}},
    ),
    "solar_open": Case(
        "solar_open", "experts in every layer, a bias that chooses, biases, yarn, heads of 6, untied",
        {key: value for key, value in MOE.items() if key != "intermediate_size"} | {"n_routed_experts": 4}
        | rope("yarn", factor=4.0, original_max_position_embeddings=32) | {"head_dim": 6, "attention_bias": True},
        hub={"first_k_dense_replace": 0, "use_qk_norm": False, "intermediate_size": 20},
    ),
    "gpt_neo": Case(
        "gpt_neo", "a window of 5 in the second layer, scores that are not scaled, biases but of q, k and v, tied",
        NEOX | {"num_layers": 2, "num_heads": 2, "max_position_embeddings": 17, "window_size": 5}
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    "gpt_bigcode": Case("gpt_bigcode", "one key head for two query heads, tied", GPT2 | {"n_inner": 20}),
    "gpt_bigcode_heads": Case(
        "gpt_bigcode", "a key head for each query head, fused by head, scores that are not scaled, untied",
        GPT2 | {"multi_query": False, "scale_attn_weights": False} | UNTIED,
    ),
    "codegen": Case(
        "codegen", "q, v and k fused in four groups, 2 of 4 channels rotated, a head with bias",
        GPT2 | {"n_head": 4, "n_inner": 20, "rotary_dim": 2},
    ),
    "biogpt": Case(
        "biogpt", "learned positions after two unused rows, scaled embeddings, tied",
        NEOX | {"max_position_embeddings": 17}, hub={"layer_norm_eps": 1e-12},
    ),
    "xglm": Case(
        "xglm", "sinusoidal positions after two unused rows, scaled embeddings, tied",
        {"vocab_size": 40, "d_model": 16, "ffn_dim": 20, "num_layers": 2, "attention_heads": 2}
        | {"max_position_embeddings": 17},
    ),
    "persimmon": Case(
        "persimmon", "q, k and v fused by head, half of each head rotated, LayerNorms of q and k, ReLU squared, untied",
        NEOX | rope(theta=100.0, partial_rotary_factor=0.5),
    ),
    "laguna": Case(
        "laguna", "a window of 5 with two heads and a dense layer, then four half rotated and experts, gates, untied",
        MOE | MIXED | {"num_attention_heads_per_layer": [2, 4], "head_dim": 8, "num_experts": 4}
        | {"shared_expert_intermediate_size": 8, "moe_router_logit_softcapping": 1.5}
        | {"moe_routed_scaling_factor": 1.7}
        | HALF_OF_FULL, hub=HALF_OF_FULL,
    ),
    "laguna_channels": Case(
        "laguna", "full attention and a dense layer, a window of 5 and experts, a gate for each channel, biases, tied",
        MOE | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5, "head_dim": 8}
        | {"shared_expert_intermediate_size": 8, "num_experts": 4, "gating": False, "attention_bias": True} | TIED,
    ),
    "kolibri1": Case(
        "kolibri1", "a window of 5 with rope, full attention without, norms before and after, a shared expert, untied",
        {key: value for key, value in (MOE | MIXED).items() if key != "intermediate_size"}
        | {"num_experts": 4, "head_dim": 6, "shared_expert_intermediate_size": 8},
    ),
    "cohere2_moe": Case(
        "cohere2_moe", "a dense layer with a window of 5 and rope, then experts averaged with two shared ones, tied",
        SIZES | MIXED | {"mlp_layer_types": ["dense", "sparse"], "num_experts": 4, "num_shared_experts": 2}
        | {"prefix_dense_intermediate_size": 24, "head_dim": 6, "logit_scale": 0.4} | TIED,
    ),
    "cohere2_moe_sigmoid": Case(
        "cohere2_moe", "RMSNorm, a dense layer with rope, then sigmoid scores and a shared expert, biases, untied",
        SIZES | {"layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense", "sparse"], "num_experts": 4}
        | {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid"}
        | {"rms_norm_eps": 1e-5, "attention_bias": True, "head_dim": 4, "logit_scale": 0.4} | UNTIED,
    ),
    "lfm2_moe_unbiased": Case(
        "lfm2_moe", "experts chosen by sigmoid scores without a bias, not renormalized, tied",
        MOE | {"num_experts": 4, "num_dense_layers": 1, "layer_types": ["full_attention", "conv"]}
        | {"use_expert_bias": False, "norm_topk_prob": False},
    ),
    "lara_mini": Case(
        "lara_mini", "the gated delta rule, a window of 5 with rope, attention without; experts, a shared one, tied",
        {key: value for key, value in MOE.items() if key != "intermediate_size"} | DELTA
        | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "sliding_attention", "full_attention"]}
        | {"sliding_window": 5, "num_experts": 4, "shared_expert_intermediate_size": 8} | TIED,
    ),
    "diffllama": Case(
        "diffllama", "differential attention, two maps over two heads with one key head, biases, rope, untied",
        SIZES | {"head_dim": 6, "attention_bias": True},
    ),
    "axk1": Case(
        "axk1", "latent attention, a dense layer, then experts with a norm after them, untied",
        {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}
        | {"q_lora_rank": 8, "mlp_layer_types": ["dense", "sparse"]},
        hub={"scoring_func": "sigmoid", "topk_method": "noaux_tc", **PUBLISHED},
    ),
    "hy_v4": Case(
        "hy_v4", "two streams, a dense layer, then experts with a clamped SwiGLU, two indexers for four layers, untied",
        {key: value for key, value in LATENT.items() if key not in ("num_key_value_heads", "first_k_dense_replace")}
        | INDEXER | {"num_hidden_layers": 4, "hc_mult": 2, "hc_magnitude": 1.5, "swiglu_limit": 0.5, "hc_eps": 1e-3}
        | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "n_group": 1},
    ),
    "longcat_flash": Case(
        "longcat_flash", "two latent attentions a layer, three of four experts and three identities, untied",
        {key: LATENT[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "n_routed_experts")}
        | {key: LATENT[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
        | {"num_layers": 2, "ffn_hidden_size": 20, "expert_ffn_hidden_size": 12, "moe_topk": 3, "zero_expert_num": 3}
        | {"q_lora_rank": 8, "head_dim": 4, "max_position_embeddings": 128, "routed_scaling_factor": 1.5},
        hub={"attention_method": "MLA", "zero_expert_type": "identity", "router_bias": False}
        | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True}, unused=r"\.experts\.[456]\.",
    ),
    "deepseek_v4": Case(
        "deepseek_v4", "two streams, a window of 3 and experts by token, blocks of 3, two of the blocks of 2, untied",
        {key: value for key, value in MOE.items() if key not in ("intermediate_size", "num_key_value_heads")}
        | {"num_hidden_layers": 3, "layer_types": [f"{kind}_attention" for kind in V4_LAYERS]}
        | {"compress_rates": {"heavily_compressed_attention": 3, "compressed_sparse_attention": 2}}
        | {"mlp_layer_types": ["hash_moe", "moe", "moe"], "n_routed_experts": 4, "hc_mult": 2, "hc_sinkhorn_iters": 3}
        | {"head_dim": 6, "partial_rotary_factor": 4 / 6, "sliding_window": 3, "q_lora_rank": 8, "swiglu_limit": 0.5}
        | {"o_groups": 2, "o_lora_rank": 5, "index_n_heads": 8, "index_head_dim": 6, "index_topk": 2},
        amiss=("padleft_vs_unpadded", "padleft_cache_vs_nocache", "padleft_cache_same_tokens"),
    ),
    "qwen4_exp_text": Case(
        "qwen4_exp_text", "two gated streams, two memories of n-grams, the delta rule, two of the blocks of 2, untied",
        {key: value for key, value in MOE.items() if key != "intermediate_size"}
        | rope(partial_rotary_factor=0.25) | DELTA | UNTIED
        | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "indexed_attention", "linear_attention"]}
        | {"num_experts": 4, "shared_expert_intermediate_size": 8, "hc_count": 2, "hc_lowrank": 6}
        | {"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 6, "indexer_budget": 4}
        | {"indexer_compress_ratio": 2, "output_gate_type": "sigmoid", "ple_layer_ids": [1, 3], "ple_embed_dim": 12}
        | {"ple_conv_kernel_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 11, "split_ngram_parts": 2}
        | {"make_ngram_vocab_size_divisible_by": 8},
    ),
    "recurrent_gemma": Case(
        "recurrent_gemma", "an RG-LRU wider than the model, a window of 5 half rotated, capped logits, biases, tied",
        {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
        | {"block_types": ["recurrent", "attention"], "lru_width": 24, "conv1d_width": 3, "attention_window_size": 5}
        | {"hidden_size": 20, "intermediate_size": 40, "attention_bias": True, "logits_soft_cap": 3.0} | TIED,
        hub={"embeddings_scale_by_sqrt_dim": True, "final_w_init_variance_scale": 1.0}, amiss=LEAKS,
    ),
    "zamba": Case(
        "zamba", "Mamba of two heads, two layers that call one shared layer of grouped queries, tied",
        MAMBA | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 0, "intermediate_size": 20}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_d_state": 3, "mamba_dt_rank": 2},
        hub={"use_mamba_kernels": False, "num_logits_to_keep": 1, "hidden_mamba_act": "silu"},
    ),
    "zamba2": Case(
        "zamba2", "Mamba-2 of two groups, two shared layers in turns, updates of their matrices, rope, biases, tied",
        MAMBA | {"layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"]}
        | {"num_hidden_layers": 5, "intermediate_size": 20, "num_attention_heads": 4, "num_mem_blocks": 2}
        | {"use_shared_attention_adapter": True, "adapter_rank": 3, "use_mem_rope": True, "add_bias_linear": True}
        | {"n_mamba_heads": 4, "mamba_d_state": 4, "mamba_ngroups": 2, "chunk_size": 4, "time_step_min": 0.3},
        hub={"use_shared_mlp_adapter": True, "rope_theta": 1e4}, amiss=(*LEAKS, *BOUNDS),
    ),
}  # fmt: skip
