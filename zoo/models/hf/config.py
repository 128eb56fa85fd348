"""Parse and validate a config.json: canonical keys, defaults filled in, and every key accounted for.

transformers 5 writes `rope_parameters` and `dtype`; most files on the hub have `rope_theta`, `rope_scaling` (with its
type under `type` or `rope_type`) and `torch_dtype`, and omit keys equal to the default of the class. A key that is
neither used nor known to be ignorable raises, because it might change the result.
"""

import difflib
import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .spec import Config, Family
from .values import (
    BOOL,
    NON_NEGATIVE_NUMBER,
    NUMBER,
    POSITIVE_NUMBER,
    WORD,
    ValueKind,
    integer,
    is_any_of,
    is_number,
    list_of,
    optional,
    table_of,
)

IGNORED_KEYS = frozenset(
    """
    architectures auto_map model_type transformers_version name_or_path _name_or_path _commit_hash dtype torch_dtype
    initializer_range initializer_factor use_cache pretraining_tp gradient_checkpointing torchscript return_dict
    output_attentions output_hidden_states attn_implementation _attn_implementation _attn_implementation_internal
    _attn_implementation_autoset attention_dropout
    attn_pdrop resid_pdrop embd_pdrop hidden_dropout classifier_dropout attention_probs_dropout_prob hidden_dropout_prob
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    tokenizer_class prefix task_specific_params finetuning_task problem_type id2label label2id num_labels
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    epsilon_cutoff eta_cutoff encoder_repetition_penalty min_new_tokens max_new_tokens cache_implementation
    vocab_file model_max_length seq_length use_bfloat16 tf_legacy_loss is_decoder unsloth_version unsloth_fixed
    output_router_logits router_aux_loss_coef
    """.split()
)
"""Keys that change no result at inference in any family: names, special token ids, training and generation options."""

REQUIRED_VALUES: Mapping[str, tuple] = {
    "quantization_config": (None,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
    "per_layer_config": (None,),
    "transformers_weights": (None,),
}
"""Keys that may change the result in any family, with the values that are implemented."""

ROPE_CONFIG_KEYS = (
    *("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"),
    "original_max_position_embeddings",
)


class ConfigError(ValueError):
    """Invalid or unsupported config.json; the message names the key."""


def read_config(family: Family, given: Mapping[str, Any], *, ignore: Collection[str] | None = ()) -> Config:
    """Parse the config.json of a family.

    - `given`: contents of the config.json.
    - `ignore`: keys to skip. If None, errors do not suggest it.

    **Raises** `ConfigError` with all keys that are unknown, have an invalid value, or ask for something that is not
    implemented.
    """
    config, errors, read_from = Config(family.defaults), [], {}
    required = {
        **{key: values for key, values in REQUIRED_VALUES.items() if key not in family.defaults},
        **family.required_values,
    }
    known = {*family.defaults, *family.aliases, *required, *family.ignored_keys, *IGNORED_KEYS}
    known |= set(ROPE_CONFIG_KEYS) if "rope_parameters" in family.defaults else set()
    given = {key: value for key, value in given.items() if key not in (ignore or ())}
    for key, value in given.items():
        canonical = family.aliases.get(key, key)
        if key in required:  # by the key as written: a canonical key that this family does not read may be required
            if not is_any_of(value, required[key]):
                allowed = " or ".join(map(repr, required[key]))
                errors.append(
                    f"{key} = {_shorten_repr(value)} would change the result, and only {allowed} is computed here"
                )
        elif canonical in ROPE_CONFIG_KEYS and "rope_parameters" in family.defaults:
            continue
        elif canonical in family.defaults:
            if error := _validate_value(value, family.defaults[canonical], canonical):
                errors.append(f"{key} = {_shorten_repr(value)} {error}")
            elif canonical in read_from and given[read_from[canonical]] != value:
                errors.append(f"{key} and {read_from[canonical]} are two words for one thing and say different things")
            else:
                is_float = isinstance(family.defaults[canonical], float)
                config[canonical] = float(value) if is_float and value is not None else value
                read_from[canonical] = key
        elif key not in known and value is not None:
            suggestion = suggest_nearest(key, known)
            errors.append(f"{key} = {_shorten_repr(value)} is not a key of {family.name} that we know{suggestion}")
    if "rope_parameters" in family.defaults:
        try:
            config["rope_parameters"] = _read_rope_parameters(
                family, {key: given[key] for key in given.keys() - required.keys()}
            )
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        hint = '. A key that changes no result of yours can be left out of account: ignore=("key",)'
        raise ConfigError("; ".join(errors) + ("" if ignore is None else hint))
    return config


COUNT_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings", "intermediate_size_mlp"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step"),
    *("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "moe_layer_interval"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("num_channels", "mlp_ratio", "pooler_output_size", "index_topk", "index_head_dim", "index_n_heads"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("state_size", "conv_kernel", "n_groups", "expand", "time_step_rank", "attention_hidden_size"),
)
_NULLABLE_COUNT_KEYS = ("sliding_window", "num_key_value_heads", "head_dim", "q_lora_rank")
"""Counts that may be null although the family has a default."""
_ZERO_ALLOWED_KEYS = (
    *("sliding_window", "first_k_dense_replace", "moe_num_shared_experts", "moe_layer_start_index"),
    "num_register_tokens",
    "num_dense_layers",
    "num_kv_shared_layers",
)
"""Counts that may be 0: the class of Qwen2-MoE writes a window of 0 for full attention."""


_COUNT = integer(minimum=1)

_KINDS: Mapping[str, ValueKind] = {
    "architectures": optional(list_of(WORD)),
    "id2label": optional(table_of(WORD)),
    **dict.fromkeys(
        ("image_size", "patch_size"),
        ValueKind(
            "a whole number above 0, or two: height and width",
            lambda value: _COUNT.fits(value) or (list_of(_COUNT).fits(value) and len(value) == 2),
        ),
    ),
    "pos_att_type": optional(
        ValueKind("a list of c2p and p2c, or these words with | between", lambda value: _is_list_of_terms(value))
    ),
    "norm_rel_ebd": ValueKind("none or layer_norm", lambda value: WORD.fits(value) and value in ("none", "layer_norm")),
    **dict.fromkeys(
        ("max_relative_positions", "position_buckets"),
        ValueKind("a whole number above 0, or -1", lambda value: integer(minimum=-1).fits(value) and value != 0),
    ),
    **dict.fromkeys(("attention_head_size", "pooler_hidden_size"), optional(integer(minimum=1))),
    "clip_qkv": optional(POSITIVE_NUMBER),
    "softmax_scale": optional(POSITIVE_NUMBER),
    "num_ln_in_parallel_attn": optional(integer(minimum=1)),
    "attn_config": ValueKind("a table", lambda value: isinstance(value, Mapping)),
    "moe_topk": ValueKind(
        "a whole number above 0, or a list of one per layer",
        lambda value: _COUNT.fits(value) or list_of(_COUNT).fits(value),
    ),
    "no_rope_layers": optional(list_of(integer(minimum=0))),
    "no_rope_layer_interval": integer(minimum=1),
    "query_pre_attn_scalar": integer(minimum=1),
    "sliding_window_pattern": ValueKind(
        "a whole number above 0, or a word of the letters L and G",
        lambda value: integer(minimum=1).fits(value) or (WORD.fits(value) and value != "" and set(value) <= set("LG")),
    ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), optional(POSITIVE_NUMBER)),
    **dict.fromkeys(("rotary_dim", "sliding_window_size", "word_embed_proj_dim"), optional(integer(minimum=1))),
    "attention_value_scale": optional(POSITIVE_NUMBER),
    "router_jitter_noise": NON_NEGATIVE_NUMBER,
    "routed_scaling_factor": POSITIVE_NUMBER,
    **dict.fromkeys(("shared_intermediate_size", "type_vocab_size", "pad_token_id"), integer(minimum=0)),
    "full_attention_interval": integer(minimum=1),
    "rescale_every": integer(minimum=0),
    "per_layer_config": ValueKind(
        "null or a table of layer numbers, each with a table of keys and values",
        lambda value: (
            value is None or (isinstance(value, Mapping) and all(isinstance(x, Mapping) for x in value.values()))
        ),
    ),
    "num_global_key_value_heads": optional(integer(minimum=1)),
    **dict.fromkeys(("global_head_dim", "vocab_size_per_layer_input"), integer(minimum=1)),
    "hidden_size_per_layer_input": integer(minimum=0),
    "sliding_rope_theta": optional(POSITIVE_NUMBER),
    **dict.fromkeys(("layer_types", "mlp_layer_types", "indexer_types"), optional(list_of(WORD))),
    "index_topk_pattern": optional(
        ValueKind("a word of the letters F and S", lambda value: WORD.fits(value) and set(value) <= set("FS"))
    ),
    "index_topk_freq": integer(minimum=1),
    "index_skip_topk_offset": integer(minimum=0),
    **dict.fromkeys(
        ("mlp_only_layers", "moe_layers", "hybrid_layer_pattern", "moe_layer_pattern"),
        optional(list_of(integer(minimum=0))),
    ),
    **dict.fromkeys(
        ("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"),
        optional(integer(minimum=1)),
    ),
    **dict.fromkeys(
        (
            *("attention_chunk_size", "floor_scale", "interleave_moe_layer_step", "no_rope_layer_interval"),
            "global_attn_every_n_layers",
        ),
        integer(minimum=1),
    ),
    "time_step_limit": ValueKind("two numbers not below 0, the second the larger", lambda value: _is_interval(value)),
}
"""Kinds of values that the default does not tell."""


def _find_kind(key: str, default: Any) -> ValueKind | None:
    """Return the kind of value that a key accepts: by its name, or else that of its default."""
    if key in _KINDS:
        return _KINDS[key]
    if key in COUNT_KEYS or key in _ZERO_ALLOWED_KEYS or key.startswith("num_"):
        return integer(minimum=0 if key in _ZERO_ALLOWED_KEYS else 1)
    if isinstance(default, float) and key.endswith("_eps"):
        return NON_NEGATIVE_NUMBER
    return next((kind for type_, kind in _KINDS_OF_DEFAULTS if isinstance(default, type_)), None)


_KINDS_OF_DEFAULTS = ((bool, BOOL), (int, integer()), (float, NUMBER), (str, WORD))
"""By the type of the default; a bool is an int, too, so it comes first."""


def _validate_value(value: Any, default: Any, key: str) -> str:
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


ROPE_TYPE_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate"),
        ),
    ),
    "proportional": ((), ("factor",)),
    "longrope": (
        ("short_factor", "long_factor"),
        ("factor", "original_max_position_embeddings", "attention_factor"),
    ),
}
"""Required and optional keys of each `rope_type`."""

_ROPE_FACTORS = ValueKind(
    "a list of numbers above 0", lambda value: bool(value) and list_of(POSITIVE_NUMBER).fits(value)
)
_ROPE_KINDS: Mapping[str, ValueKind] = {
    "rope_type": WORD,
    "truncate": BOOL,
    "llama_4_scaling_beta": NON_NEGATIVE_NUMBER,
    "short_factor": _ROPE_FACTORS,
    "long_factor": _ROPE_FACTORS,
}
"""Kinds of the values of RoPE that are no number above 0."""

_ROPE_BASE_KEYS = ("rope_theta", "partial_rotary_factor")
"""Keys of every `rope_type`."""


LAYER_TYPES = ("sliding_attention", "full_attention")
"""Types of layers that may have a RoPE of their own."""


def _read_rope_parameters(family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    """Read canonical `rope_parameters` from either spelling, by layer type if the family's default is by layer type.

    The older spelling has one `rope_theta`, and for sliding layers another in `sliding_rope_theta`, or the family's own
    where that differs from the one of full layers. Its `rope_scaling` is that of full layers.
    """
    canonical = {family.aliases.get(key, key): value for key, value in given.items() if value is not None}
    default = family.defaults["rope_parameters"]
    if not default.keys() >= set(LAYER_TYPES):
        return _read_rope(family, canonical, default)
    nested, sliding = canonical.get("rope_parameters", {}), default["sliding_attention"]
    if not isinstance(nested, Mapping) or any(not isinstance(nested.get(kind, {}), Mapping) for kind in LAYER_TYPES):
        raise ConfigError(
            f"rope_parameters = {_shorten_repr(nested)} should have a table each for {' and '.join(LAYER_TYPES)}"
        )
    base = {key: value for key, value in canonical.items() if key in ROPE_CONFIG_KEYS and key != "rope_parameters"}
    if nested:
        if unknown := sorted(nested.keys() - set(LAYER_TYPES)):
            raise ConfigError(f"rope_parameters has {unknown[0]!r}, and tables here are {' and '.join(LAYER_TYPES)}")
        return {
            kind: _read_rope(family, {**base, "rope_parameters": nested.get(kind)}, default[kind]) for kind in nested
        }
    local = canonical.get("sliding_rope_theta")
    if local is None:
        is_same = sliding["rope_theta"] == default["full_attention"]["rope_theta"]
        local = canonical.get("rope_theta", sliding["rope_theta"]) if is_same else sliding["rope_theta"]
    full = _read_rope(family, base, default["full_attention"])
    return {"sliding_attention": _read_rope(family, {"rope_theta": local}, sliding), "full_attention": full}


def _read_rope(family: Family, canonical: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Read one RoPE from either spelling. Without any, the default applies, which may scale RoPE.

    **Raises** `ConfigError` for an unknown `rope_type`, and for missing, unknown or invalid keys.
    """
    canonical = {key: value for key, value in canonical.items() if value is not None}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(canonical.get(key, {}), Mapping):
            raise ConfigError(f"{key} = {_shorten_repr(canonical[key])} should be a table of names and numbers")
    scaling = canonical.get("rope_scaling") or canonical.get("rope_parameters")
    if scaling is None:
        scaling = {key: value for key, value in default.items() if key not in _ROPE_BASE_KEYS}
    elif family.scaled_rope_theta is not None:
        default = {**default, "rope_theta": family.scaled_rope_theta}
    skipped = {"type", *family.ignored_keys}
    base_keys = [key for key in _ROPE_BASE_KEYS if key in default or key in canonical]
    rope = {key: canonical.get(key, default.get(key)) for key in base_keys}
    rope |= {key: value for key, value in scaling.items() if key not in skipped and value is not None}
    original_length = canonical.get("original_max_position_embeddings")
    if original_length is not None and _read_rope_type(scaling) in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = original_length  # top level in Phi-3, where it takes precedence
    rope_type = _read_rope_type(scaling)
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPE_KEYS:
        suggestion = suggest_nearest(str(rope_type), ROPE_TYPE_KEYS)
        raise ConfigError(f"rope_type = {rope_type!r} is no kind that we know{suggestion}")
    required, optional = ROPE_TYPE_KEYS[rope_type]
    known = {*required, *optional, *family.rope_keys, "rope_theta", "rope_type", "partial_rotary_factor"}
    partial = default.get("partial_rotary_factor")
    if partial is None and rope.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(
            f"partial_rotary_factor = {rope['partial_rotary_factor']}, and {family.name} turns all of each head"
        )
    if missing := [key for key in required if rope.get(key) is None]:
        raise ConfigError(f"rope_type {rope_type!r} needs {' and '.join(missing)}")
    if unknown := [key for key, value in rope.items() if key not in known and value is not None]:
        raise ConfigError(f"rope_type {rope_type!r} has no key {unknown[0]!r}{suggest_nearest(unknown[0], known)}")
    for key, value in rope.items():
        if error := _ROPE_KINDS.get(key, POSITIVE_NUMBER).find_error(value):
            raise ConfigError(f"{key} = {_shorten_repr(value)} of rope_type {rope_type!r} {error}")
    return {**rope, "rope_type": rope_type}


def _read_rope_type(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def suggest_nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the closest known word, or "" if none is close."""
    known = sorted(known)
    if len(known) > 300:  # tensor names of a checkpoint: difflib would take a second per word
        known = heapq.nlargest(30, known, key=lambda other: _count_shared_ends(word, other))
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _count_shared_ends(first: str, second: str) -> int:
    """Return the length of the common prefix plus that of the common suffix."""
    count_equal = lambda pairs: sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    prefix = count_equal(zip(first, second, strict=False))
    return prefix + count_equal(zip(reversed(first), reversed(second), strict=False))


def _shorten_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
