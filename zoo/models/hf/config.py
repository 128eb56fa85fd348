"""Parse and validate a config.json: canonical keys, defaults filled in, and every key accounted for.

transformers 5 writes `rope_parameters` and `dtype`; most files on the hub have `rope_theta`, `rope_scaling` (with its
type under `type` or `rope_type`) and `torch_dtype`, and omit keys equal to the default of the class. A key that is
neither used nor known to be ignorable raises, because it might change the result.
"""

from collections.abc import Collection, Mapping
from typing import Any

from .errors import ConfigError, shorten_repr, suggest_nearest
from .rope_config import ROPE_CONFIG_KEYS, read_rope_parameters
from .spec import Config, Family
from .values import is_any_of

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


def read_config(family: Family, given: Mapping[str, Any], *, ignore: Collection[str] | None = ()) -> Config:
    """Parse the config.json of a family.

    - `given`: contents of the config.json.
    - `ignore`: keys to skip. Errors suggest it for keys that the family does not read, unless it is None.

    **Raises** `ConfigError` with all keys that are unknown, have an invalid value, or ask for something that is not
    implemented.
    """
    config = Config(family.defaults)
    errors = []
    read_from = {}
    can_be_ignored = False  # a key that the family reads has a default, which is another model
    required = {
        **{key: values for key, values in REQUIRED_VALUES.items() if key not in family.defaults},
        **family.required_values,
    }
    known = {*family.defaults, *family.aliases, *required, *family.ignored_keys, *IGNORED_KEYS}
    if "rope_parameters" in family.defaults:
        known.update(ROPE_CONFIG_KEYS)
    given = {key: value for key, value in given.items() if key not in (ignore or ())}
    for key, value in given.items():
        canonical = family.aliases.get(key, key)
        if key in required:  # by the key as written: a canonical key that this family does not read may be required
            if not is_any_of(value, required[key]):
                allowed = " or ".join(map(repr, required[key]))
                errors.append(
                    f"{key} = {shorten_repr(value)} would change the result, and only {allowed} is computed here"
                )
                can_be_ignored = True
        elif canonical in ROPE_CONFIG_KEYS and "rope_parameters" in family.defaults:
            continue
        elif canonical in family.defaults:
            if error := family.kinds[canonical].find_error(value):
                errors.append(f"{key} = {shorten_repr(value)} {error}")
            elif canonical in read_from and given[read_from[canonical]] != value:
                errors.append(f"{key} and {read_from[canonical]} are two words for one thing and say different things")
            else:
                if value is not None and isinstance(family.defaults[canonical], float):
                    value = float(value)
                config[canonical] = value
                read_from[canonical] = key
        elif key not in known and value is not None:
            read = (known - IGNORED_KEYS - family.ignored_keys).union(family.defaults, family.aliases)
            suggestion = suggest_nearest(key, read)
            errors.append(f"{key} = {shorten_repr(value)} is not a key of {family.name} that we know{suggestion}")
            can_be_ignored = True
    if not config.get("sliding_window_pattern", 1) and config.get("sliding_window") is not None:
        key = read_from.get("sliding_window_pattern", "sliding_window_pattern")
        errors.append(
            f"{key} = {config['sliding_window_pattern']} should be a whole number above 0: there is a sliding_window"
        )
    if "rope_parameters" in family.defaults:
        try:
            config["rope_parameters"] = read_rope_parameters(
                family, {key: given[key] for key in given.keys() - required.keys()}
            )
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        message = "; ".join(errors)
        if can_be_ignored and ignore is not None:
            stop = "" if message.endswith("?") else "."
            message += f'{stop} A key that changes no result of yours may be ignored: ignore=("key",)'
        raise ConfigError(message)
    return config
