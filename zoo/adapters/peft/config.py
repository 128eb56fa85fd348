"""Read and validate PEFT's adapter_config.json: the method, its options, and the options that are not supported."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zoo.models.hf.config import suggest_nearest
from zoo.weights import CheckpointError
from zoo.weights.safetensors import read_json

CONFIG_FILE = "adapter_config.json"

_COMMON_DEFAULTS: Mapping[str, Any] = {
    "auto_mapping": None, "base_model_name_or_path": None, "exclude_modules": None, "inference_mode": True,
    "modules_to_save": None, "peft_type": None, "peft_version": None, "revision": None, "target_modules": None,
    "task_type": None, "layers_pattern": None, "layers_to_transform": None, "fan_in_fan_out": False, "bias": "none",
    "ensure_weight_tying": False,
}  # fmt: skip
"""Keys of all methods, with PEFT's defaults. Target modules follow from the tensors of the file, and the layout of the
base's weights (`fan_in_fan_out`) from the name table of the family."""

_LORA_DEFAULTS: Mapping[str, Any] = {
    "r": 8, "lora_alpha": 8, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "use_dora": False,
    "lora_dropout": 0.0, "init_lora_weights": True,
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
    "alora_invocation_tokens": (None,), "arrow_config": (None,), "kasa_config": (None,), "layer_replication": (None,),
    "lora_bias": (False,), "megatron_config": (None,), "monteclora_config": (None,), "target_parameters": (None, []),
    "trainable_token_indices": (None,), "use_bdlora": (None, False), "use_qalora": (False,), "velora_config": (None,),
}  # fmt: skip

_ADALORA_DEFAULTS: Mapping[str, Any] = {"init_r": 12, "lora_alpha": 8, "lora_dropout": 0.0, "init_lora_weights": True}
_ADALORA_IGNORED_KEYS = (
    *_LORA_IGNORED_KEYS, "r", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight",
    "total_step", "rank_pattern", "alpha_pattern", "use_rslora",
)  # fmt: skip
"""Rank allocation, whose result follows from the tensors, and keys of LoRA that PEFT ignores for AdaLoRA."""
_ADALORA_REQUIRED_VALUES: Mapping[str, tuple] = {**_LORA_REQUIRED_VALUES, "use_dora": (False,)}

_OFT_DEFAULTS: Mapping[str, Any] = {
    "module_dropout": 0.0, "block_share": False, "use_cayley_neumann": True, "num_cayley_neumann_terms": 5,
}  # fmt: skip
_OFT_IGNORED_KEYS = ("r", "oft_block_size", "init_weights", "eps")
"""Block size and count, which follow from the tensors, and initialization."""

_LYCORIS_DEFAULTS: Mapping[str, Any] = {
    "r": 8, "alpha": 8, "alpha_pattern": {}, "rank_dropout": 0.0, "module_dropout": 0.0, "rank_dropout_scale": False,
}  # fmt: skip
_LYCORIS_REQUIRED_VALUES: Mapping[str, tuple] = {"rank_pattern": ({},)}

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
}
"""Per method: its keys with defaults, ignored keys, and keys with the only values that are supported."""


def read_config(directory: Path) -> dict[str, Any]:
    """Read an adapter's config and fill in the defaults. **Raises** `CheckpointError` for an unknown or unsupported
    method or option."""
    path = directory / CONFIG_FILE
    config = read_json(path)
    method = config.get("peft_type")
    if not isinstance(method, str) or method not in _METHODS:
        raise CheckpointError(
            f"{path} has the peft_type {method!r}{suggest_nearest(str(method), _METHODS) or '.'} "
            f"Methods that are read: {', '.join(_METHODS)}"
        )
    defaults, ignored_keys, required_values = _METHODS[method]
    for key, value in config.items():
        if key in required_values and value not in required_values[key]:
            allowed = " or ".join(map(repr, required_values[key]))
            raise CheckpointError(f"{path}: {key} = {value!r} is not computed here; it is read where it is {allowed}")
        if key not in {*_COMMON_DEFAULTS, *defaults, *ignored_keys, *required_values}:
            known = {*_COMMON_DEFAULTS, *defaults}
            raise CheckpointError(f"{path}: the key {key!r} is not known{suggest_nearest(key, known) or ' to us.'}")
    checked = {key: value for key, value in {**defaults, **config}.items() if key not in ignored_keys}
    for error in _find_config_errors(checked):
        raise CheckpointError(f"{path}: {error}")
    if method == "OFT" and (error := _find_version_error(config)):
        raise CheckpointError(f"{path}: {error}")
    supported = ("none", "lora_only", "all") if method == "LORA" else ("none",)
    if config.get("bias", "none") not in supported:
        raise CheckpointError(
            f"{path}: bias = {config['bias']!r} is not read with this method; it is {' or '.join(map(repr, supported))}"
        )
    return {**_COMMON_DEFAULTS, **defaults, **config}


def _find_config_errors(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield errors in the numbers and patterns of a config."""
    for key, what in {"r": "a rank", "init_r": "a rank", "num_cayley_neumann_terms": "a number"}.items():
        number = config.get(key, 1)
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            yield f"{key} = {number!r}, where {what} of at least 1 was expected"
    for key in ("lora_alpha", "alpha"):
        if key in config and not _is_number(config[key]):
            yield f"{key} = {config[key]!r}, where a number was expected"
    for key in ("rank_pattern", "alpha_pattern"):
        table = config.get(key) or {}
        if not isinstance(table, dict) or not all(map(_is_number, table.values())):
            yield f"{key} = {table!r}, where a table of numbers was expected"
            continue
        for pattern in table:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{key} has the pattern {pattern!r}, which is none: {error}"


def _find_version_error(config: Mapping[str, Any]) -> str:
    """Return an error for an OFT of an older version of PEFT that computes something else, or an empty string."""
    if "oft_block_size" not in config:
        return "it has no oft_block_size: before PEFT 0.14 an OFT turned outputs, which is not computed here"
    version = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version")))
    if config.get("use_cayley_neumann") and (version is None or (int(version[1]), int(version[2])) < (0, 18)):
        return "use_cayley_neumann = True: before PEFT 0.18 its series was another, which is not computed here"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _matches_pattern(pattern: str, module: str) -> bool:
    """Return True if a key of rank_pattern or alpha_pattern matches a module: a suffix of its name, or a regular
    expression for one."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def scale_from_config(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / rank of a module, or alpha / sqrt(rank) with rsLoRA."""
    default = config["lora_alpha"] if "lora_alpha" in config else config["alpha"]
    alpha = next((a for pattern, a in config["alpha_pattern"].items() if _matches_pattern(pattern, module)), default)
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
