"""Small configs of every family, other values of each key, and the models that they describe."""

import json
from functools import lru_cache, partial
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from tests.quick import mark_slow
from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES

TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "n_group": 4,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_heads": 4,
    "n_groups": 2,
    "state_size": 3,
    "rotary_dim": 16,
    "full_attention_interval": 2,
    "layer_group_size": 2,
    "full_attn_idxs": [1],
    "block_multiple_of": 4,
    "intermediate_size_by_layer": 12,
    "kv_channels": 16,
    "num_kv_shared_layers": 0,
    "mamba_n_heads": 4,
    "mamba_d_ssm": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "moe_shared_expert_intermediate_size": 12,
    "attn_layer_indices": [1],
    "attn_layer_period": 2,
    "attn_layer_offset": 0,
    "expert_layer_offset": 0,
    "position_embedding_type": "rope",
    "shared_intermediate_size": 12,
    "o_groups": 2,
    "hc_mult": 2,
    "decoder_ffn_dim": 12,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_start_token_id": 2,
    "text_config": TOWER,
    "vision_config": TOWER,
}
ANOTHER = {
    "output_gate_type": "sigmoid",
    "indexer_n_heads": 2,
    "indexer_head_dim": 6,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [2],
    "ple_embed_dim": 48,
    "eos_token_id": 3,
    "projector_hidden_act": "relu",
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "original_max_position_embeddings": 8,
    "use_sliding_window": True,
    "vocab_size": 13,
    "hidden_size": 96,
    "intermediate_size": 20,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "sliding_window": 5,
    "max_window_layers": 3,
    "hidden_act": "tanh",
    "rope_parameters": {"rope_theta": 5.0},
    "rope_theta": 7.0,
    "partial_rotary_factor": 0.5,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_experts_per_tok": 1,
    "n_routed_experts": 16,
    "n_group": 2,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "first_k_dense_replace": 2,
    "n_shared_experts": 2,
    "mlp_only_layers": [1],
    "clip_qkv": 0.5,
    "quantization_config": {"quant_method": "mxfp4"},
    "n_groups": 4,
    "time_step_limit": [0.0, 0.05],
    "time_step_rank": 5,
    "attention_hidden_size": 24,
    "sliding_window_pattern": 2,
    "sliding_rope_theta": 3.0,
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "rotary_dim": 8,
    "no_rope_layers": [1, 0, 1],
    "no_rope_layer_interval": 2,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
    "global_attn_every_n_layers": 2,
    "hybrid_layer_pattern": [1, 1, 0],
    "moe_layer_pattern": [0, 1, 0],
    "sliding_window_size": 5,
    "moe_layers": [0, 1],
    "attention_chunk_size": 3,
    "architectures": ["NoSuchModel"],
    "classifier_pooling": "mean",
    "classifier_activation": "relu",
    "pad_token_id": 3,
    "num_labels": 3,
    "pooler_output_size": 48,
    "pooler_act": "gelu",
    "routed_scaling_factor": 3.5,
    "id2label": {"0": "cat", "1": "dog", "2": "axolotl"},
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"), 3),
    "word_embed_proj_dim": 8,
    "num_ln_in_parallel_attn": 1,
    "attn_config": {"clip_qkv": 0.5},
    "linear_attn_config": {"head_dim": 6},
    "weight_mode": "fused",
    "q_lora_rank": 6,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 48,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "linear_num_heads"), 4),
    "ffn_round_up_to_multiple_of": 5,
    "ffn_proj_factor": 5.0,
    "pos_att_type": ["c2p"],
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 6,
    "max_relative_positions": 10,
    "attention_head_size": 8,
    "pooler_hidden_size": 24,
    "pooler_hidden_act": "relu",
    "indexer_types": ["full", "shared", "full"],
    "index_topk_pattern": "FSF",
    "full_attention_interval": 3,
    "layer_group_size": 3,
    "full_attn_idxs": [0, 2],
    "block_multiple_of": 5,
    "rescale_every": 2,
    "num_global_key_value_heads": 1,
    "per_layer_config": {"1": {"head_dim": 8}},
    "intermediate_size_by_layer": [12, 20, 12],
    "activation_sparsity_pattern": [0.5, 0.0, 0.9],
    "num_kv_shared_layers": 1,
    "top_k_experts": 3,
    "num_experts": 12,
    "moe_intermediate_size": 6,
    "layer_rope_theta": [100.0, 0, 50.0],
    "num_attention_heads_per_layer": [2, 4, 2],
    "attention_multiplier": 0.3,
    "block_type": "parallel",
    "rope": False,
    "layer_norm_type": "gemma_rms",
    "attention_types": [[["local"], 2], [["global"], 1]],
    "attn_layer_indices": [0],
    "mamba_d_head": 8,
    "mamba_dt_rank": 5,
    "position_embedding_type": None,
    "layers_block_type": ["mamba", "mlp", "moe"],
    "hybrid_override_pattern": "M-E*",
    "mtp_layers_block_type": ["attention", "moe"],
    "mtp_hybrid_override_pattern": "*E",
    "embedding_size": 24,
    "moe_latent_size": 8,
    "mamba_d_ssm": 32,
    "ssm_multipliers": [0.5, 1.0, 1.0, 1.0, 2.0],
    "mlp_multipliers": [0.5, 2.0],
    "mlp_hidden_act": "silu",
    "block_types": ["attention", "recurrent"],
    "lru_width": 48,
    "rms_norm_eps": 3e-3,
    "expert_selection_fn": "sigmoid",
    "shared_expert_combination_strategy": "sum",
    "prefix_dense_intermediate_size": 20,
    "attention_head_dim": 12,
    "use_mem_rope": False,
    "hidden_ratio": 32,
    "attn": {"layers": [1], "num_heads": 2},
    "lower_bound": -3.0,
    "num_kv_heads": 2,
    "num_v_heads": 8,
    "output_gate_activation": "sigmoid",
    "num_heads": 8,
    "value_dim": [48, 48, 48],
    "feature_map": "relu",
    "clamp_min": -2.0,
    "expand_ratio": 16,
    "rope_fraction": 1.0,
    "num_slots": 6,
    "decoder_start_token_id": 5,
    "forced_bos_token_id": 6,
    "decoder_vocab_size": 7,
    "decoder_attention_heads": 4,
    "num_decoder_layers": 5,
    "feed_forward_proj": "gated-silu",
    "encoder": {"hidden_size": 96},
    "decoder": {"num_hidden_layers": 2},
    **dict.fromkeys(("text_config_dict", "vision_config_dict"), TOWER | {"hidden_size": 96}),
    "projection_size": 24,
    "qk_rope_head_dim": 8,
    "compress_rates": {"compressed_sparse_attention": 2},
    "compress_ratios": [0, 4, 128],
    "num_hash_layers": 1,
}
"""Values other than the small model's. For keys that are not listed, `other_value` derives one."""
OTHER_WORDS = {"silu": "relu", "l2": "sum", "sqrtsoftplus": "sigmoid"}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c"], "position_buckets": 4}
CONTEXTS = [
    {},
    {"sliding_window": 4, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    {"sliding_window": 4, "no_rope_layers": [0, 1, 1]},
    {"use_sliding_window": True, "sliding_window": 4, "no_rope_layers": [0, 1, 1]},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    {"topk_method": "group_limited_greedy", "mlp_only_layers": [0]},
    {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1]},
    {"architectures": ["ViTModel"]},
    *({"architectures": [f"{name}ForSequenceClassification"]} for name in ("Bert", "Roberta", "XLMRoberta")),
    *({"architectures": [f"{name}ForSequenceClassification"]} for name in ("ModernBert", "EuroBert", "NomicBert")),
    *({"architectures": [f"{name}ForSequenceClassification"]} for name in ("Camembert", "DistilBert", "Albert")),
    *({"architectures": [f"{name}ForSequenceClassification"]} for name in ("Electra", "MPNet", "RoFormer")),
    *({"architectures": [f"{name}ForSequenceClassification"]} for name in ("RobertaPreLayerNorm", "XLMRobertaXL")),
    {"new_decoder_architecture": True},
    {"index_topk_freq": 2},
    {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    RELATIVE,
    {"architectures": ["DebertaV2ForSequenceClassification"]},
    {"attention_k_eq_v": True},
    {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 4},
    {"mamba_rms_norm": True},
    {"mamba_d_ssm": None},
    {"num_kv_shared_layers": 1, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    {"layer_types": ["conv", "full_attention", "conv"]},
    {"layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 4},
    {"expert_selection_fn": "sigmoid", "num_shared_experts": 1, "first_k_dense_replace": 2},
    {"intermediate_size": None},
    {"embedding_size": None},
    {"expand_ratio": None},
    {"use_short_conv": True},
    {"layer_types": None, "mlp_layer_types": None},
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    {"num_hidden_layers": None, "num_layers": 2},
    {"tie_word_embeddings": True},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    {"use_sliding_window": True, "sliding_window": 4, "num_hidden_layers": 3, "max_window_layers": 1},
]
"""Some keys have an effect only together with others."""

EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
VARIED = ("llama", "gpt2", "modernbert", "deberta-v2", "dinov3_vit", "mamba2")
"""Families that differ most; every key of all has a test of its invalid values."""
EACH_AT_LENGTH = pytest.mark.parametrize(
    "family", mark_slow(FAMILIES.values(), but=VARIED, name=lambda family: family.name), ids=str
)
"""Every family, in tests that build a model for each key; `pytest -m slow tests/models/hf` runs those not above."""
ROTARY_FAMILIES = [
    family
    for family in FAMILIES.values()
    if "rope_parameters" in family.defaults
    and not {"full_attention", "main"} & family.defaults["rope_parameters"].keys()
]


HAS_ROPE_BY_TYPE = [
    family for family in FAMILIES.values() if "full_attention" in family.defaults.get("rope_parameters", {})
]
"""Families whose `rope_parameters` have a table for each type of layers, with tests of their own."""


def alias_of(family, key):
    """Return the name of a canonical key in the files of a family."""
    return {canonical: alias for alias, canonical in family.aliases.items()}.get(key, key)


def small(family, **more):
    omitted = {"intermediate_size"} if "expand" in family.defaults else set()  # the two determine each other
    known = family.defaults.keys() - omitted
    if family.name == "mimo_v2_flash":  # a third of 16 values is no whole number of pairs
        more = {"hidden_size": 48, "head_dim": 18, "num_attention_heads": 8} | more
    if family.name == "llada":  # the default is refused
        more = {"block_type": "llama", "layer_norm_type": "rms", "rope": True, "hidden_act": "silu"} | more
    if family.name == "granitemoehybrid":  # the default has no attention
        more = {"layer_types": ["mamba", "attention", "mamba"]} | more
    if family.name == "zamba":  # the first three layers have types of their own
        more = {"num_hidden_layers": 6} | more
    if family.name == "t5gemma":  # the sizes are in tables
        stack = {"vocab_size": SMALL["vocab_size"], "num_hidden_layers": 3}
        more = {"encoder": stack, "decoder": stack} | more
    if family.name == "deepseek_v4":  # the default has no sparse layers
        types = [f"{kind}_attention" for kind in ("sliding", "heavily_compressed", "compressed_sparse")]
        more = {"layer_types": types, "mlp_layer_types": ["hash_moe", "moe", "moe"]} | more
    if family.name == "longcat_flash":  # two attentions a layer
        more = {"num_hidden_layers": 6} | more
    if "vision_config" in known and "tie_word_embeddings" in known:  # a model of images and text
        heads = {"num_key_value_heads": 2}
        own = {"gemma4": heads, "diffusion_gemma": heads, "qwen3_vl": {"deepstack_visual_indexes": [0]}}
        own |= {name: {"num_hidden_layers": 5} for name in ("llava", "internvl")}  # of which the last are not read
        text = TOWER | heads
        if family.name == "diffusion_gemma":
            text |= {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 4}
        more = {"text_config": text, "vision_config": TOWER | own.get(family.name, {})} | more
        if "hidden_size" in known:  # older files have the text's keys beside the table
            known = known - {"text_config"}
    if family.name == "qwen4_exp_text":  # the default has no indexer, and no memory of n-grams
        sizes = dict.fromkeys(("n_heads", "head_dim", "budget", "compress_ratio"), 4)
        memory = {"ple_layer_ids": [1], "eos_token_id": 2, "ngram_vocab_size_base": 11, "split_ngram_parts": 2}
        more = {"full_attention_interval": 2} | memory | more
        more = {f"indexer_{name}": size for name, size in sizes.items()} | more
    if family.name == "zamba2":  # the default has 54 layers
        more = {"layers_block_type": ["mamba", "hybrid", "hybrid"], "use_mem_rope": True} | more
    sizes = {"rwkv7": {"num_heads": 2}, "mamba3": {"state_size": 8}, "hgrn2": {"expand_ratio": 8}}
    more = sizes.get(family.name, {}) | more  # heads of several sizes, and pairs of states
    if family in HAS_ROPE_BY_TYPE and "rope_parameters" in more:
        tables = {"full_attention": more["rope_parameters"], "sliding_attention": {}}
        more = more | {"rope_parameters": tables, "layer_types": ["full_attention"] * 3}
    return {alias_of(family, key): value for key, value in (SMALL | more).items() if key in known}


@lru_cache(maxsize=64)
def build_from_text(name, text):
    family = FAMILIES[name]
    config = read_config(family, json.loads(text))
    with mock.patch("jax.random.truncated_normal", zeros_of_draw):  # shapes do not depend on values
        return eqx.filter_eval_shape(partial(family.build, config), key=jax.random.key(0))


def zeros_of_draw(key, lower, upper, shape, dtype=float):
    """Stand in for a draw, which takes a third of the time to trace a model."""
    return jnp.zeros(shape, dtype)


def build(family, given):
    return build_from_text(family.name, json.dumps(given))


def other_value(key, default, small=None):
    """Return another value of a key. `small`: its value in a small config."""
    if key in ANOTHER:
        return ANOTHER[key]
    if key in ("text_config", "vision_config"):
        return (small or TOWER) | {"hidden_size": 96}
    if key == "tie_word_embeddings":
        return not (default if small is None else small)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return type(default)(default * 2 or 1)
    if default in OTHER_WORDS:
        return OTHER_WORDS[default]
    pytest.fail(f"the value {default!r} of {key!r} does not suggest another: list one in ANOTHER")


def build_or_error(family, given):
    """Return the model of a config, or the error message of `read_config` or of `Family.build`."""
    try:
        return build(family, given)
    except ValueError as error:
        assert str(error)
        return str(error)
