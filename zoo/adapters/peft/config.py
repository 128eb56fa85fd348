"""Read and validate PEFT's adapter_config.json: the method, its options, and the options that are not supported.

Options are read by type, never by their truth: `"false"`, `1` and `[0]` are not bools.
"""

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from zoo.models.hf.errors import suggest_nearest
from zoo.models.hf.values import (
    BOOL,
    NUMBER,
    WORD,
    ValueKind,
    integer,
    is_any_of,
    is_number,
    list_of,
    optional,
    table_of,
)
from zoo.weights.safetensors import CheckpointError, read_json

CONFIG_FILE = "adapter_config.json"

_COMMON_DEFAULTS: Mapping[str, Any] = {
    "auto_mapping": None, "base_model_name_or_path": None, "exclude_modules": None, "inference_mode": True,
    "modules_to_save": None, "peft_type": None, "peft_version": None, "revision": None, "target_modules": None,
    "task_type": None, "layers_pattern": None, "layers_to_transform": None, "fan_in_fan_out": False, "bias": "none",
    "ensure_weight_tying": False,
}  # fmt: skip
"""Keys of all methods, with PEFT's defaults. The layout of the base's weights (`fan_in_fan_out`) follows from the name
table of the family."""

_LORA_DEFAULTS: Mapping[str, Any] = {
    "r": 8, "lora_alpha": 8, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "use_dora": False,
    "lora_dropout": 0.0, "init_lora_weights": True, "target_parameters": None, "trainable_token_indices": None,
    "layer_replication": None,
}  # fmt: skip
_LORA_IGNORED_KEYS = (
    "corda_config",
    "eva_config",
    "lora_ga_config",
    "loftq_config",
    "megatron_core",
    "qalora_group_size",
)
"""Initialization, and options that have no effect without another that is refused."""
_LORA_REQUIRED_VALUES: Mapping[str, tuple] = {
    "alora_invocation_tokens": (None,), "arrow_config": (None,), "kasa_config": (None,),
    "lora_bias": (False,), "megatron_config": (None,), "monteclora_config": (None,),
    "use_bdlora": (None, False), "use_qalora": (False,), "velora_config": (None,),
}  # fmt: skip

_ADALORA_DEFAULTS: Mapping[str, Any] = {
    "init_r": 12, "lora_alpha": 8, "rank_pattern": None, "lora_dropout": 0.0, "init_lora_weights": True,
}  # fmt: skip
_ADALORA_IGNORED_KEYS = (
    *_LORA_IGNORED_KEYS, "r", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight",
    "total_step", "alpha_pattern", "use_rslora",
)  # fmt: skip
"""The schedule of rank allocation, and keys of LoRA that PEFT ignores for AdaLoRA."""
_ADALORA_REQUIRED_VALUES: Mapping[str, tuple] = {
    **_LORA_REQUIRED_VALUES,
    "use_dora": (False,),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "target_parameters": (None, []),
}

_OFT_DEFAULTS: Mapping[str, Any] = {
    "r": 0, "oft_block_size": 32, "module_dropout": 0.0, "block_share": False, "use_cayley_neumann": True,
    "num_cayley_neumann_terms": 5,
}  # fmt: skip
_OFT_IGNORED_KEYS = ("init_weights", "eps")

_LYCORIS_DEFAULTS: Mapping[str, Any] = {
    "r": 8, "alpha": 8, "alpha_pattern": {}, "rank_dropout": 0.0, "module_dropout": 0.0, "rank_dropout_scale": False,
}  # fmt: skip
_LYCORIS_REQUIRED_VALUES: Mapping[str, tuple] = {"rank_pattern": ({},)}

_PROMPT_DEFAULTS: Mapping[str, Any] = {"num_virtual_tokens": None}
_PROMPT_IGNORED_KEYS = (
    "token_dim", "num_attention_heads", "num_layers", "init_weights", "prefix_projection", "prompt_tuning_init",
    "prompt_tuning_init_text", "prompt_tuning_init_state_dict_path", "tokenizer_name_or_path", "tokenizer_kwargs",
    "encoder_reparameterization_type", "encoder_hidden_size", "encoder_num_layers", "encoder_dropout",
)  # fmt: skip
"""Sizes, and how virtual tokens were made: the file has the result."""
_PROMPT = (
    _PROMPT_DEFAULTS,
    _PROMPT_IGNORED_KEYS,
    {"num_transformer_submodules": (None, 1), "modules_to_save": (None,)},
)

_METHODS: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...], Mapping[str, tuple]]] = {
    "LORA": (_LORA_DEFAULTS, _LORA_IGNORED_KEYS, _LORA_REQUIRED_VALUES),
    "IA3": ({"feedforward_modules": None, "init_ia3_weights": True}, (), {}),
    "LOHA": (_LYCORIS_DEFAULTS, ("init_weights", "use_effective_conv2d"), _LYCORIS_REQUIRED_VALUES),
    "LOKR": (
        _LYCORIS_DEFAULTS | {"decompose_both": False, "decompose_factor": -1},
        ("init_weights", "use_effective_conv2d"),
        _LYCORIS_REQUIRED_VALUES,
    ),
    "VERA": (
        {"r": 256, "save_projection": True, "vera_dropout": 0.0, "d_initial": 0.1},
        ("init_weights", "projection_prng_key"),
        {},
    ),
    "OFT": (_OFT_DEFAULTS, _OFT_IGNORED_KEYS, {"coft": (False,)}),
    "ADALORA": (_ADALORA_DEFAULTS, _ADALORA_IGNORED_KEYS, _ADALORA_REQUIRED_VALUES),
    **dict.fromkeys(("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"), _PROMPT),
    "CARTRIDGE": (_PROMPT_DEFAULTS | {"num_frozen_tokens": 1}, *_PROMPT[1:]),
    "TRAINABLE_TOKENS": ({"token_indices": None}, ("init_weights",), {"modules_to_save": (None,)}),
}
"""Per method: its keys with defaults, ignored keys, and keys with the only values that are supported."""


_RATE = ValueKind("a rate of at least 0 and at most 1", lambda value: is_number(value) and 0 <= value <= 1)
_RANK = integer(minimum=1, words="a rank of at least 1")
_RANKS = ValueKind("a table of patterns and ranks of at least 1", optional(table_of(_RANK)).fits)
_ALPHAS = ValueKind("a table of patterns and numbers", optional(table_of(NUMBER)).fits)
_WORDS = list_of(WORD)
_NAMES = ValueKind("a list of names, or a pattern", lambda value: WORD.fits(value) or _WORDS.fits(value))
_LAYERS = ValueKind(
    "a layer number, or a list of them",
    lambda value: integer(minimum=0).fits(value) or list_of(integer(minimum=0)).fits(value),
)
_IDS = list_of(integer(minimum=0))
_TOKENS = ValueKind(
    "null, a list of token ids, or a table of one module and such a list",
    lambda value: optional(_IDS).fits(value) or table_of(_IDS).fits(value),
)
SUBTRACTED_INITIAL_VALUES = ("pissa", "olora")
"""Initializations with a part of the base's weight, which PEFT subtracts from the base whenever it reads the file."""
_STRETCHES = ValueKind(
    "a list of stretches of layers, [begin, end]",
    lambda value: list_of(_IDS).fits(value) and all(len(pair) == 2 for pair in value),
)
_INITIAL_VALUES = (True, False, "gaussian", "eva", "orthogonal", *SUBTRACTED_INITIAL_VALUES)
_INITIALIZATION = ValueKind(
    f"one of {', '.join(map(repr, _INITIAL_VALUES))}, since PEFT changes the base's weights for the others whenever it "
    "reads the file, and at random (save with path_initial_model_for_weight_conversion)",
    lambda value: is_any_of(value, _INITIAL_VALUES),
)
_KINDS: Mapping[str, ValueKind] = {
    "base_model_name_or_path": optional(WORD), "peft_version": optional(WORD), "task_type": optional(WORD),
    "revision": optional(WORD), "inference_mode": BOOL, "bias": WORD, "fan_in_fan_out": BOOL,
    "ensure_weight_tying": BOOL, "exclude_modules": optional(_NAMES), "target_modules": optional(_NAMES),
    "feedforward_modules": optional(_NAMES), "target_parameters": optional(_WORDS), "modules_to_save": optional(_WORDS),
    "layers_to_transform": optional(_LAYERS), "layers_pattern": optional(_NAMES), "r": _RANK, "init_r": _RANK,
    "lora_alpha": NUMBER, "alpha": NUMBER, "alpha_pattern": _ALPHAS, "rank_pattern": _RANKS,
    "use_rslora": BOOL, "use_dora": BOOL, "lora_dropout": _RATE, "vera_dropout": _RATE, "rank_dropout": _RATE,
    "module_dropout": _RATE, "rank_dropout_scale": BOOL, "init_lora_weights": _INITIALIZATION,
    "init_ia3_weights": BOOL, "save_projection": BOOL, "d_initial": NUMBER, "decompose_both": BOOL,
    "decompose_factor": integer(minimum=-1), "block_share": BOOL, "use_cayley_neumann": BOOL,
    "num_cayley_neumann_terms": integer(minimum=1, words="a number of at least 1"),
    "num_virtual_tokens": integer(minimum=1, words="a number of at least 1"), "num_frozen_tokens": integer(minimum=0),
    "layer_replication": optional(_STRETCHES), "trainable_token_indices": _TOKENS,
    "token_indices": _IDS,
}  # fmt: skip
"""Kinds of the options that are read. Those of `_METHODS` that have other values with one method are in
`_KINDS_BY_METHOD`."""
_KINDS_BY_METHOD: Mapping[str, Mapping[str, ValueKind]] = {
    "OFT": {"r": integer(minimum=0), "oft_block_size": integer(minimum=0)},
    "ADALORA": {
        "rank_pattern": ValueKind("a table of names and lists of bools", optional(table_of(list_of(BOOL))).fits)
    },
}


def read_config(directory: Path) -> dict[str, Any]:
    """Read an adapter's config and fill in the defaults. **Raises** `CheckpointError` for an unknown or unsupported
    method or option, and for an option of another type."""
    path = directory / CONFIG_FILE
    given = read_json(path)
    method = given.get("peft_type")
    if not isinstance(method, str) or method not in _METHODS:
        raise CheckpointError(
            f"{path} has the peft_type {method!r}{suggest_nearest(str(method), _METHODS) or '.'} "
            f"Methods that are read: {', '.join(_METHODS)}"
        )
    defaults, ignored_keys, required_values = _METHODS[method]
    config = {**_COMMON_DEFAULTS, **defaults, **given}
    for error in (
        *_find_unsupported_options(given, {*_COMMON_DEFAULTS, *defaults}, ignored_keys, required_values),
        *_find_wrong_values({key: value for key, value in config.items() if key not in ignored_keys}),
    ):
        raise CheckpointError(f"{path}: {error}")
    return config


def _find_unsupported_options(
    config: Mapping[str, Any], known: Collection[str], ignored: Collection[str], required: Mapping[str, tuple]
) -> Iterator[str]:
    """Yield errors for unknown keys, and for options that are not supported."""
    for key, value in config.items():
        if key in required and not is_any_of(value, required[key]):
            allowed = " or ".join(map(repr, required[key]))
            yield f"{key} = {value!r} is not computed here; it is read where it is {allowed}"
        if key not in {*known, *ignored, *required}:
            yield f"the key {key!r} is not known{suggest_nearest(key, known) or ' to us.'}"
    method = config["peft_type"]
    if method == "OFT" and (error := _find_version_error(config)):
        yield error
    supported = ("none", "lora_only", "all") if method == "LORA" else ("none",)
    if config.get("bias", "none") not in supported:
        yield (f"bias = {config['bias']!r} is not read with this method; it is {' or '.join(map(repr, supported))}")


def _find_wrong_values(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield errors in the types of options, and in patterns."""
    method = config["peft_type"]
    kinds = {**_KINDS, **_KINDS_BY_METHOD.get(method, {})}
    for key, value in config.items():
        if key in kinds and (error := kinds[key].find_error(value)):
            yield f"{key} = {shorten_repr(value)} {error}"
            return  # the checks below read these options
    patterns: list[tuple[str, Callable[[str], Any], Any]] = []
    for key in ("target_modules", "exclude_modules", "feedforward_modules"):
        if isinstance(config.get(key), str):
            patterns.append((key, re.compile, config[key]))
    if method != "ADALORA":
        tables = [(key, config.get(key) or {}) for key in ("rank_pattern", "alpha_pattern")]
        patterns += [(key, _compile_suffix, pattern) for key, table in tables for pattern in table]
    for key, compile_pattern, pattern in patterns:
        try:
            compile_pattern(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            yield f"{key} has the pattern {shorten_repr(pattern)}, which is not a regular expression: {error}"
    words = config.get("layers_pattern") or ()
    for word in [words] if isinstance(words, str) else words:
        if re.fullmatch(r"\w+", word) is None:
            yield f"layers_pattern = {shorten_repr(word)} should be the name of a list of layers, without a pattern"
    if not any(config.get(key) for key in ("target_modules", "target_parameters", "num_virtual_tokens")):
        yield "target_modules names no module"
    if method == "OFT" and bool(config["r"]) == bool(config["oft_block_size"]):
        yield f"r = {config['r']} and oft_block_size = {config['oft_block_size']}: one of the two should be 0"
    if config.get("use_dora") and config.get("target_parameters"):
        yield "use_dora and target_parameters exclude each other, in PEFT too"


def _find_version_error(config: Mapping[str, Any]) -> str:
    """Return an error for an OFT of an older version of PEFT that computes something else, or an empty string."""
    if "oft_block_size" not in config:
        return "it has no oft_block_size: before PEFT 0.14 an OFT turned outputs, which is not computed here"
    version = re.match(r"(\d{1,6})\.(\d{1,6})", str(config.get("peft_version")))
    if config.get("use_cayley_neumann", True) and (version is None or (int(version[1]), int(version[2])) < (0, 18)):
        return "use_cayley_neumann = True: before PEFT 0.18 its series was another, which is not computed here"
    return ""


@functools.lru_cache(maxsize=10_000)  # a table may have a key for every module, and `re` caches 512
def _compile_suffix(pattern: str) -> re.Pattern[str]:
    """Compile a key of `rank_pattern` or `alpha_pattern`, which matches the last parts of a name, as in PEFT."""
    return re.compile(rf"(.*\.)?({pattern})$")


def shorten_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _lookup(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module, as PEFT does."""
    return next((value for key, value in patterns.items() if _compile_suffix(key).match(module)), default)


def rank_from_config(config: Mapping[str, Any], module: str) -> int:
    """Return the rank that the config gives to a module, or to a parameter of `target_parameters`."""
    return _lookup(config.get("rank_pattern") or {}, module, config["r"])


def scale_from_config(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / rank of a module, or alpha / sqrt(rank) with rsLoRA."""
    default = config["lora_alpha"] if "lora_alpha" in config else config["alpha"]
    alpha = _lookup(config["alpha_pattern"] or {}, module, default)
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
