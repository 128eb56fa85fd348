"""Kinds of values that the keys of a config.json accept: by the name of the key, or else by its default."""

from collections.abc import Mapping
from typing import Any

from .values import (
    BOOL,
    NON_NEGATIVE_NUMBER,
    NUMBER,
    POSITIVE_NUMBER,
    WORD,
    ValueKind,
    integer,
    is_number,
    list_of,
    optional,
    table_of,
)

_COUNT_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "intermediate_size_mlp", "head_dim", "global_head_dim"),
    *("max_position_embeddings", "mlp_ratio", "query_pre_attn_scalar", "floor_scale", "attention_chunk_size"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("index_topk", "index_topk_freq", "index_head_dim", "index_n_heads", "vocab_size_per_layer_input"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "n_routed_experts", "n_shared_experts"),
    *("n_group", "topk_group", "decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step"),
    *("full_attention_interval", "global_attn_every_n_layers", "no_rope_layer_interval"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("state_size", "conv_kernel", "n_groups", "expand", "time_step_rank", "attention_hidden_size"),
    *("laurel_rank", "kv_channels"),
)
"""Whole numbers above 0, as are keys that begin with num_."""
_OPTIONAL_COUNT_KEYS = (
    *("sliding_window_size", "rotary_dim", "word_embed_proj_dim", "num_ln_in_parallel_attn", "pooler_output_size"),
    *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"),
    *("num_global_key_value_heads", "attention_head_size", "pooler_hidden_size", "top_k_experts"),
)
"""Whole numbers above 0, or null."""
_NULLABLE_COUNT_KEYS = ("sliding_window", "sliding_window_pattern", "num_key_value_heads", "head_dim", "q_lora_rank")
"""Counts that may be null although the family has a default."""
_ZERO_ALLOWED_KEYS = (
    *("sliding_window", "first_k_dense_replace", "moe_num_shared_experts", "moe_layer_start_index"),
    *("num_register_tokens", "num_dense_layers", "num_kv_shared_layers", "shared_intermediate_size"),
    *("type_vocab_size", "pad_token_id", "rescale_every", "hidden_size_per_layer_input", "index_skip_topk_offset"),
    "altup_active_idx",
)
"""Counts that may be 0: the class of Qwen2-MoE writes a window of 0 for full attention."""
_POSITIVE_KEYS = (
    *("clip_qkv", "softmax_scale", "attn_logit_softcapping", "final_logit_softcapping"),
    *("attention_value_scale", "sliding_rope_theta"),
)
"""Numbers above 0, or null."""
_WORD_LIST_KEYS = ("architectures", "layer_types", "mlp_layer_types", "indexer_types")
_LAYER_LIST_KEYS = ("no_rope_layers", "mlp_only_layers", "moe_layers", "hybrid_layer_pattern", "moe_layer_pattern")
"""Lists of layer numbers, or of a number per layer; or null."""

_COUNT = integer(minimum=1)

_KINDS: Mapping[str, ValueKind] = {
    **dict.fromkeys(_OPTIONAL_COUNT_KEYS, optional(_COUNT)),
    **dict.fromkeys(_POSITIVE_KEYS, optional(POSITIVE_NUMBER)),
    **dict.fromkeys(_WORD_LIST_KEYS, optional(list_of(WORD))),
    **dict.fromkeys(_LAYER_LIST_KEYS, optional(list_of(integer(minimum=0)))),
    **dict.fromkeys(
        ("image_size", "patch_size"),
        ValueKind(
            "a whole number above 0, or two: height and width",
            lambda value: _COUNT.fits(value) or (list_of(_COUNT).fits(value) and len(value) == 2),
        ),
    ),
    **dict.fromkeys(
        ("max_relative_positions", "position_buckets"),
        ValueKind("a whole number above 0, or -1", lambda value: integer(minimum=-1).fits(value) and value != 0),
    ),
    "activation_sparsity_pattern": optional(
        list_of(ValueKind("a number from 0 to below 1", lambda value: NON_NEGATIVE_NUMBER.fits(value) and value < 1))
    ),
    "altup_num_inputs": ValueKind(  # each is a matrix to build
        "a whole number from 1 to 1024", lambda value: _COUNT.fits(value) and value <= 1024
    ),
    "attn_config": ValueKind("a table", lambda value: isinstance(value, Mapping)),
    "id2label": optional(table_of(WORD)),
    "index_topk_pattern": optional(
        ValueKind("a word of the letters F and S", lambda value: WORD.fits(value) and set(value) <= set("FS"))
    ),
    **dict.fromkeys(
        ("moe_topk", "intermediate_size_by_layer"),
        ValueKind(
            "a whole number above 0, or a list of one per layer",
            lambda value: _COUNT.fits(value) or list_of(_COUNT).fits(value),
        ),
    ),
    "norm_rel_ebd": ValueKind("none or layer_norm", lambda value: WORD.fits(value) and value in ("none", "layer_norm")),
    "per_layer_config": ValueKind(
        "null or a table of layer numbers, each with a table of keys and values",
        lambda value: (
            value is None or (isinstance(value, Mapping) and all(isinstance(x, Mapping) for x in value.values()))
        ),
    ),
    "pos_att_type": optional(
        ValueKind("a list of c2p and p2c, or these words with | between", lambda value: _is_list_of_terms(value))
    ),
    "routed_scaling_factor": POSITIVE_NUMBER,
    "router_jitter_noise": NON_NEGATIVE_NUMBER,
    "sliding_window_pattern": ValueKind(
        "a whole number, or a word of the letters L and G",
        lambda value: integer(minimum=0).fits(value) or (WORD.fits(value) and value != "" and set(value) <= set("LG")),
    ),
    "time_step_limit": ValueKind("two numbers not below 0, the second the larger", lambda value: _is_interval(value)),
}
"""Kinds of values that neither the default nor a list above tells."""


def _find_kind(key: str, default: Any) -> ValueKind | None:
    """Return the kind of value that a key accepts: by its name, or else that of its default."""
    if key in _KINDS:
        return _KINDS[key]
    if key in _COUNT_KEYS or key in _ZERO_ALLOWED_KEYS or key.startswith("num_"):
        return integer(minimum=0 if key in _ZERO_ALLOWED_KEYS else 1)
    if isinstance(default, float) and key.endswith("_eps"):
        return NON_NEGATIVE_NUMBER
    return next((kind for type_, kind in _KINDS_OF_DEFAULTS if isinstance(default, type_)), None)


_KINDS_OF_DEFAULTS = ((bool, BOOL), (int, integer()), (float, NUMBER), (str, WORD))
"""By the type of the default; a bool is an int, too, so it comes first."""


def validate_value(value: Any, default: Any, key: str) -> str:
    """Return an error message for a value of another type or range than the key's; "" for a valid one."""
    if key == "time_step_rank" and value == "auto":
        return ""
    if value is None and (default is None or key in _NULLABLE_COUNT_KEYS):
        return ""
    if key == "quantization_config":
        return "" if is_mxfp4(value) else "would change the result, and only quant_method 'mxfp4' is read here"
    kind = _find_kind(key, default)
    assert kind is not None, f"no kind of value is known for {key}"
    return kind.find_error(value)


def _is_list_of_terms(value: Any) -> bool:
    """Return True for the terms of position in the scores of DeBERTa."""
    terms = [term.strip() for term in value.lower().split("|")] if isinstance(value, str) else value
    return list_of(WORD).fits(terms) and set(terms) <= {"c2p", "p2c"}


def is_mxfp4(value: Any) -> bool:
    """Return True for a quantization config of MXFP4 weights without further options. The modules that are not
    quantized are read off the tensors."""
    if not isinstance(value, Mapping) or value.get("quant_method") != "mxfp4":
        return False
    is_valid = optional(list_of(WORD)).fits(value.get("modules_to_not_convert"))
    is_valid = is_valid and optional(BOOL).fits(value.get("dequantize"))
    return is_valid and value.keys() <= {"quant_method", "modules_to_not_convert", "dequantize"}


def _is_interval(value: Any) -> bool:
    """Return True for two increasing numbers not below 0. Infinity is written {"__float__": "Infinity"}."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    low, high = (float("inf") if x == {"__float__": "Infinity"} else x for x in value)
    return is_number(low) and is_number(high) and 0 <= low < high
