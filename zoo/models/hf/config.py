"""From a config.json, in either spelling, to the values that a family's model is built from: every key accounted for.

transformers 5 writes `rope_parameters` and `dtype`; most files on hubs have `rope_theta`, `rope_scaling` (its kind
under `type` or `rope_type`), `torch_dtype`, and omit what is equal to the class's default. A key that is neither used
nor known to change nothing is an error: it might change the result.
"""

import difflib
import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeGuard

from .spec import Config, Family

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
    output_router_logits router_aux_loss_coef router_jitter_noise
    """.split()
)
"""Keys that change no result at inference in any family: names, ids of special tokens, training, generation."""

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
"""Keys that may change a result in any family, with the values that are computed here."""

ROPE_CONFIG_KEYS = (
    *("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"),
    "original_max_position_embeddings",
)


class ConfigError(ValueError):
    """A config.json that we do not understand, or do not honor: says which key."""


def read_config(family: Family, given: Mapping[str, Any], *, ignore: Collection[str] | None = ()) -> Config:
    """The config of a family from what a config.json holds; keys in `ignore` are left out of account. With None errors
    do not say that they can be.

    **Raises** `ConfigError` for a key that is unknown, whose value is of another type than it should be, or that asks
    for what we do not compute: all of them at once, by name.
    """
    config, wrong, said = Config(family.defaults), [], {}
    only = {
        **{key: values for key, values in REQUIRED_VALUES.items() if key not in family.defaults},
        **family.required_values,
    }
    known = {*family.defaults, *family.aliases, *only, *family.ignored_keys, *IGNORED_KEYS}
    known |= set(ROPE_CONFIG_KEYS) if "rope_parameters" in family.defaults else set()
    given = {key: value for key, value in given.items() if key not in (ignore or ())}
    for key, value in given.items():
        usual = family.aliases.get(key, key)
        if key in only:  # the family's own word: another family's word for the same may be read by nobody
            if value not in only[key]:
                allowed = " or ".join(map(repr, only[key]))
                wrong.append(
                    f"{key} = {_shorten_repr(value)} would change the result, and only {allowed} is computed here"
                )
        elif usual in ROPE_CONFIG_KEYS and usual in known:
            continue
        elif usual in family.defaults:
            if complaint := _validate_value(value, family.defaults[usual], usual):
                wrong.append(f"{key} = {_shorten_repr(value)} {complaint}")
            elif usual in said and given[said[usual]] != value:
                wrong.append(f"{key} and {said[usual]} are two words for one thing and say different things")
            else:
                config[usual] = float(value) if isinstance(family.defaults[usual], float) else value
                said[usual] = key
        elif key not in known and value is not None:
            wrong.append(
                f"{key} = {_shorten_repr(value)} is not a key of {family.name} that we know{suggest_nearest(key, known)}"
            )
    if "rope_parameters" in family.defaults:
        try:
            config["rope_parameters"] = _read_rope_parameters(
                family, {key: given[key] for key in given.keys() - only.keys()}
            )
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        hint = '. A key that changes no result of yours can be left out of account: ignore=("key",)'
        raise ConfigError("; ".join(wrong) + ("" if ignore is None else hint))
    return config


_MAX_VALUE = 1e30  # a number of a config that is larger is a mistake, and float32 does not go much further
_MAX_COUNT = 2**31
COUNT_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step"),
    *("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "moe_layer_interval"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("state_size", "conv_kernel", "n_groups", "expand", "time_step_rank", "attention_hidden_size"),
)
_NULLABLE_COUNT_KEYS = ("sliding_window", "num_key_value_heads", "head_dim", "q_lora_rank")
"""Counts that may be null though a family has a default of its own."""
_ZERO_ALLOWED_KEYS = ("sliding_window", "first_k_dense_replace", "moe_num_shared_experts", "moe_layer_start_index")
"""Counts that may be 0: Qwen2-MoE's class writes a window of 0 where there is none."""


def _validate_value(value: Any, default: Any, key: str) -> str:
    """What is wrong with a value, seen from the default's type; "" where nothing is."""
    if key == "time_step_rank" and value == "auto":
        return ""
    if key == "time_step_limit":
        return "" if _is_interval(value) else "should be two numbers not below 0, the second the larger"
    if key in COUNT_KEYS or key in _ZERO_ALLOWED_KEYS or key.startswith("num_"):
        if value is None and (default is None or key in _NULLABLE_COUNT_KEYS):
            return ""
        least, told = (0, "not below 0") if key in _ZERO_ALLOWED_KEYS else (1, "above 0")
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MAX_COUNT
        return "" if fits else f"should be a whole number {told}, and not beyond 2 ** 31"
    if key == "quantization_config" and value is not None:
        return "" if is_mxfp4(value) else "would change the result, and only quant_method 'mxfp4' is read here"
    if key == "layer_types" and value is not None:
        return "" if isinstance(value, list) and all(isinstance(x, str) for x in value) else "should be a list of words"
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "should be true or false"
    if isinstance(default, int):
        return "" if _is_number(value) and isinstance(value, int) else "should be a whole number"
    if isinstance(default, float) and key.endswith("_eps"):
        return "" if _is_number(value) and 0 <= value < _MAX_VALUE else "should be a number, and not below 0"
    if isinstance(default, float):
        return "" if _is_number(value) and abs(value) < _MAX_VALUE else "should be a number"
    if isinstance(default, str):
        return "" if isinstance(value, str) else "should be a word"
    return ""


def is_mxfp4(value: Any) -> bool:
    """Whether this says no more than that weights are packed as `zoo.ops.mxfp4` has them. Which modules are not is
    seen from the tensors that there are."""
    if not isinstance(value, Mapping) or value.get("quant_method") != "mxfp4":
        return False
    left_out = value.get("modules_to_not_convert") or []
    listed = isinstance(left_out, list) and all(isinstance(name, str) for name in left_out)
    return listed and value.keys() <= {"quant_method", "modules_to_not_convert", "dequantize"}


def _is_interval(value: Any) -> bool:
    """Two numbers, the second the larger. It may be infinite, which transformers writes as a table of one word."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    low, high = (float("inf") if x == {"__float__": "Infinity"} else x for x in value)
    return _is_number(low) and _is_number(high) and 0 <= low < high


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
    "longrope": (
        ("short_factor", "long_factor"),
        ("factor", "original_max_position_embeddings", "attention_factor"),
    ),
}
"""Kinds of rotary embedding: the keys that each needs, and those that it may have."""


_ROPE_BASE_KEYS = ("rope_theta", "partial_rotary_factor")
"""What is said of a rotary embedding whatever its kind."""


def _read_rope_parameters(family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    """The one spelling of rotary embeddings that we use, from whichever the file has. Where it has none, the family's
    default may be one that stretches them.

    **Raises** `ConfigError` for an unknown kind, and for a key that is missing, unknown or no number.
    """
    usual = {family.aliases.get(key, key): value for key, value in given.items() if value is not None}
    default = family.defaults["rope_parameters"]
    scaling = usual.get("rope_scaling") or usual.get("rope_parameters")
    scaling = (
        {key: value for key, value in default.items() if key not in _ROPE_BASE_KEYS} if scaling is None else scaling
    )
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"rope_parameters = {_shorten_repr(scaling)} should be a table of names and numbers")
    found = {key: usual.get(key, default.get(key)) for key in _ROPE_BASE_KEYS if key in default or key in usual}
    found |= {key: value for key, value in scaling.items() if key != "type" and value is not None}
    outside = usual.get("original_max_position_embeddings")
    if outside is not None and _read_rope_type(scaling) in ("llama3", "yarn", "longrope"):
        found["original_max_position_embeddings"] = outside  # phi3 has it there, and there it counts for more
    kind = _read_rope_type(scaling)
    if not isinstance(kind, str) or kind not in ROPE_TYPE_KEYS:
        raise ConfigError(f"rope_type = {kind!r} is no kind that we know{suggest_nearest(str(kind), ROPE_TYPE_KEYS)}")
    needed, possible = ROPE_TYPE_KEYS[kind]
    known = {*needed, *possible, "rope_theta", "rope_type", "partial_rotary_factor"}
    partial = family.defaults["rope_parameters"].get("partial_rotary_factor")
    if partial is None and found.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(
            f"partial_rotary_factor = {found['partial_rotary_factor']}, and {family.name} turns all of each head"
        )
    if missing := [key for key in needed if found.get(key) is None]:
        raise ConfigError(f"rope_type {kind!r} needs {' and '.join(missing)}")
    if unknown := [key for key, value in found.items() if key not in known and value is not None]:
        raise ConfigError(f"rope_type {kind!r} has no key {unknown[0]!r}{suggest_nearest(unknown[0], known)}")
    for key, value in found.items():
        if complaint := _validate_rope_value(value, key):
            raise ConfigError(f"{key} = {_shorten_repr(value)} of rope_type {kind!r} should be {complaint}")
    return {**found, "rope_type": kind}


def _read_rope_type(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _validate_rope_value(value: Any, key: str) -> str:
    """What a value of a rotary embedding should be; "" where it is that."""
    if key in ("rope_type", "truncate"):
        return "" if isinstance(value, str if key == "rope_type" else bool) else "true or false"
    if key in ("short_factor", "long_factor"):
        listed = isinstance(value, list | tuple) and len(value) > 0 and all(map(is_positive_number, value))
        return "" if listed else "a list of numbers above 0"
    return "" if is_positive_number(value) else "a number above 0"


def is_positive_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MAX_VALUE


def suggest_nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing where no known word is like it."""
    known = sorted(known)
    if len(known) > 300:  # the tensors of a checkpoint: difflib would take a second for each word
        known = heapq.nlargest(30, known, key=lambda other: _count_shared_ends(word, other))
    alike = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {alike[0]!r}?" if alike else ""


def _count_shared_ends(first: str, second: str) -> int:
    """How many characters two words begin and end with alike."""
    alike = lambda pairs: sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return alike(zip(first, second, strict=False)) + alike(zip(reversed(first), reversed(second), strict=False))


def _shorten_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
